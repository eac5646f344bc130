"""Charging: a parsed chat template in which loops and macros pay for what they do. `template_sandbox` runs it.

Jinja lets an environment replace binary operators and calls alone; the other operations that make or walk values become
filters of the sandbox here.
"""

from collections.abc import Iterable
from typing import Any

import jinja2
import jinja2.visitor
from jinja2 import nodes

CHARS_PER_STEP = 16  # so that all values of a rendering together have 320 million characters at most

_REFUSED = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.ScopedEvalContextModifier)


class Charging(jinja2.visitor.NodeTransformer):
    """Puts the charges and the operations above into a parsed template."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, _REFUSED):
            raise jinja2.TemplateSyntaxError(f"{type(node).__name__} is nothing for chat templates", node.lineno)
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:  # charged where it is true and where it is not
            node.test = nodes.And(nodes.Not(_charging([node.test], node.lineno)), node.test)
        return self._charge(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._charge(self.generic_visit(node))

    visit_CallBlock = visit_Macro

    def _charge(self, node: Any) -> nodes.Node:
        node.body.insert(0, nodes.ExprStmt(_charging(node.body, node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        at = [part or nodes.Const(None) for part in (node.arg.start, node.arg.stop, node.arg.step)]
        return _filter(node.node, "slice", *at)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _comparable(node.key)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        asked = [operand.op for operand in node.ops]
        if "in" in asked or "notin" in asked:
            if len(asked) > 1:
                raise jinja2.TemplateSyntaxError("`in` within a chain of comparisons", node.lineno)
            found = _filter(node.expr, "contains", node.ops[0].expr)
            return found if asked == ["in"] else nodes.Not(found, lineno=node.lineno)
        if len(asked) == 1 and isinstance(node.ops[0].expr, nodes.Const):
            return node  # takes no longer than the constant is
        node.expr = _comparable(node.expr)
        for operand in node.ops:
            operand.expr = _comparable(operand.expr)
        return node


def _filter(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _comparable(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filter(node, "comparable")


def _charging(body: Iterable[nodes.Node], lineno: int) -> nodes.Filter:
    """The charge for running `body` once, at most; loops and macros in it are charged for their own bodies."""
    steps, rest = 1, list(body)
    while rest:
        node = rest.pop()
        steps += 1 + (len(node.data) // CHARS_PER_STEP if isinstance(node, nodes.TemplateData) else 0)
        own_body = isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
        rest.extend(node.iter_child_nodes(exclude=("body",) if own_body else None))
    return _filter(nodes.Const(steps, lineno=lineno), "charge")
