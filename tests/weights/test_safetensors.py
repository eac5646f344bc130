"""Loading: every tensor lands in its place, and whatever does not fit is named before anything is read."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from synthetic_checkpoint import NAMES, abstract, expected, shard_name, tensors, write, write_shards

from jhybrid.errors import WeightsError
from jhybrid.weights import safetensors as loader
from jhybrid.weights.names import TensorName
from jhybrid.weights.places import dotted, leaves
from jhybrid.weights.safetensors import load_safetensors


def check(params: dict, dtype: str = "float32") -> None:
    found = {dotted(path): leaf for path, leaf in leaves(params)}
    assert found.keys() == expected().keys()
    for path, want in expected().items():
        assert isinstance(found[path], jax.Array)
        assert found[path].dtype == dtype
        np.testing.assert_array_equal(np.asarray(found[path], np.float32), want, err_msg=path)


def refusal(directory, names=NAMES, **kwargs) -> str:
    """The message of the refusal, made without reading one tensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "_stream", lambda *_: pytest.fail("tensors were read before the refusal"))
        with pytest.raises(WeightsError) as caught:
            load_safetensors(directory, abstract(), names, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("writer", [write, write_shards])
def test_every_tensor_lands_in_its_place(tmp_path, writer):
    """Fused rows, expert index, both at once, squeezed axes; also across shards."""
    writer(tmp_path, tensors())
    check(load_safetensors(tmp_path, abstract(), NAMES))


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float64", "float32"])
@pytest.mark.parametrize("wanted", ["bfloat16", "float32"])
def test_dtype_is_the_targets(tmp_path, stored, wanted):
    """Numbers up to 256 are exact in every dtype here."""
    write(tmp_path, tensors(stored))
    check(load_safetensors(tmp_path, abstract(wanted), NAMES), wanted)


def test_parameters_go_where_the_target_says(tmp_path):
    write(tmp_path, tensors())
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), abstract())
    params = load_safetensors(tmp_path, target, NAMES)
    check(params)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(params))


def test_second_spelling_is_read(tmp_path):
    made = tensors()
    made["model.embed.weight"] = made.pop("backbone.embed.weight")
    write(tmp_path, made)
    check(load_safetensors(tmp_path, abstract(), NAMES))


def test_missing_unexpected_and_misshapen_are_reported_together(tmp_path):
    made = tensors()
    del made["k.weight"], made["experts.1.up.weight"]
    made["norm.weight"] = np.zeros((5,), np.float32)
    made["conv1d.weight"] = made["conv1d.weight"].reshape(3, 1, 6)
    made["bonus.weight"] = np.zeros((2,), np.float32)
    write(tmp_path, made)
    message = refusal(tmp_path)
    assert "2 tensor(s) missing" in message
    assert "k.weight" in message
    assert "experts.1.up.weight" in message
    assert "2 tensor(s) of the wrong shape" in message
    assert "norm.weight: [5], norm needs [4]" in message
    assert "conv1d.weight: [3, 1, 6], conv needs [6, 3]" in message
    assert "1 tensor(s) in the checkpoint that the model does not have:\n  bonus.weight" in message
    assert "parameter(s)" not in message  # a missing tensor is told once


def test_long_lists_are_cut(tmp_path):
    write(tmp_path, tensors() | {f"extra.{i:03d}": np.zeros(1, np.float32) for i in range(50)})
    message = refusal(tmp_path)
    assert "50 tensor(s) in the checkpoint" in message
    assert "extra.019" in message
    assert "extra.020" not in message
    assert "and 30 more" in message


def test_transposed_matrix_is_misshapen_even_when_its_size_fits(tmp_path):
    made = tensors()
    made["q.weight"] = np.ascontiguousarray(made["q.weight"].T)
    write(tmp_path, made)
    assert "q.weight: [4, 6], qkv.weight needs [6, 4]" in refusal(tmp_path)


def test_ignored_patterns_match_whole_names(tmp_path):
    extra = {"mtp.layers.0.weight": np.zeros(3, np.float32), "lm_head.weight": np.zeros((7, 4), np.float32)}
    write(tmp_path, tensors() | extra)
    check(load_safetensors(tmp_path, abstract(), NAMES, ignored=(r"mtp\..*", r"lm_head\.weight")))
    message = refusal(tmp_path, ignored=(r"mtp", r"lm_head\.weight"))
    assert "mtp.layers.0.weight" in message
    assert "lm_head" not in message


@pytest.mark.parametrize("rows", [1, 3, 4096])
def test_a_tied_head_may_be_stored_if_it_is_the_same(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(loader, "COMPARED_ROWS", rows)
    copies = {"lm_head.weight": ("model.embed.weight", "backbone.embed.weight")}
    made = tensors("bfloat16")
    made["lm_head.weight"] = made["backbone.embed.weight"].copy()
    write(tmp_path, made)
    check(load_safetensors(tmp_path, abstract(), NAMES, copies=copies))
    for stored in (made["lm_head.weight"] + 1, made["lm_head.weight"].astype(np.int8), made["lm_head.weight"][:-1]):
        write(tmp_path, made | {"lm_head.weight": stored, "lm_head.weight_scale": np.ones((7, 1), np.float32)})
        message = refusal(tmp_path, copies=copies)
        assert "lm_head.weight (" in message and "is not backbone.embed.weight (BF16) over again" in message
        assert "set tie_word_embeddings to false" in message
    made["lm_head.weight"][-1, -1] += 1
    write(tmp_path, made)
    assert "over again" in refusal(tmp_path, copies=copies)


def test_quantised_dtype_is_refused(tmp_path):
    write(tmp_path, tensors() | {"norm.weight": np.zeros(4, np.int8)})
    assert "norm.weight: I8" in refusal(tmp_path)


def test_parameter_without_a_name_is_named(tmp_path):
    write(tmp_path, {n: a for n, a in tensors().items() if n != "v.weight"})
    message = refusal(tmp_path, [n for n in NAMES if n.names != ("v.weight",)])
    assert "1 parameter(s) that no tensor fills completely:\n  qkv.weight" in message


@pytest.mark.parametrize("rows", [(7, 10), (6, 10)])
def test_overlapping_names_are_refused(tmp_path, rows):
    made = tensors() | {"v.weight": np.zeros((rows[1] - rows[0], 4), np.float32)}
    write(tmp_path, made)
    names = [replace(n, rows=rows) if n.names == ("v.weight",) else n for n in NAMES]
    assert "1 parameter(s) that tensors fill more than once:\n  qkv.weight" in refusal(tmp_path, names)


def test_optional_tensors_stand_in_for_each_other(tmp_path):
    """Fused experts or one tensor each: either will do, neither or both will not."""
    each = [replace(n, required=False) if n.path == ("experts", "up") else n for n in NAMES]
    names = [*each, TensorName(("experts.up",), ("experts", "up"), required=False)]
    single = tensors()
    fused = {n: a for n, a in single.items() if ".up." not in n} | {"experts.up": expected()["experts.up"]}
    for made in (single, fused):
        write(tmp_path, made)
        check(load_safetensors(tmp_path, abstract(), names))
    write(tmp_path, {n: a for n, a in fused.items() if n != "experts.up"})
    assert "experts.up (from experts.0.up.weight, experts.1.up.weight, experts.up)" in refusal(tmp_path, names)
    write(tmp_path, single | fused)
    assert "fill more than once:\n  experts.up" in refusal(tmp_path, names)


def test_tied_tensor_fills_two_parameters(tmp_path):
    write(tmp_path, tensors())
    target = abstract() | {"lm_head": jax.ShapeDtypeStruct((7, 4), "bfloat16")}
    params = load_safetensors(tmp_path, target, [*NAMES, TensorName(("backbone.embed.weight",), ("lm_head",))])
    np.testing.assert_array_equal(params["embedding"], np.asarray(params["lm_head"], np.float32))
    assert params["lm_head"].dtype == "bfloat16"


def test_missing_shard_is_refused_by_name(tmp_path):
    write_shards(tmp_path, tensors())
    (tmp_path / shard_name(1)).unlink()
    message = refusal(tmp_path)
    assert f"1 of 3 shard files listed in model.safetensors.index.json are missing: {shard_name(1)}" in message


def test_tensor_absent_from_its_shard_is_named(tmp_path):
    write_shards(tmp_path, tensors())
    save_file({"k.weight": tensors()["k.weight"]}, tmp_path / shard_name(1))
    message = refusal(tmp_path)
    assert f"(not in {shard_name(1)})" in message
    assert "k.weight" not in message


def test_tensor_in_two_shards_is_refused(tmp_path):
    write_shards(tmp_path, tensors())
    made = {n: a for n, a in tensors().items() if json_index(tmp_path)[n] == shard_name(2)}
    save_file(made | {"q.weight": np.zeros((6, 4), np.float32)}, tmp_path / shard_name(2))
    assert f"q.weight (in {shard_name(0)} and {shard_name(2)})" in refusal(tmp_path)


def json_index(directory) -> dict[str, str]:
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize("kept", [0, 4, 40, 500, -1])
def test_truncated_file_is_named(tmp_path, kept):
    write_shards(tmp_path, tensors())
    path = tmp_path / shard_name(2)
    path.write_bytes(path.read_bytes()[:kept])
    message = refusal(tmp_path)
    assert f"{path}: truncated or damaged" in message
    assert "download this file again" in message


def test_lfs_pointer_is_recognised(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "not an index"),
        ("[]", "not an index"),
        ("[" * 200_000, "not an index"),
        ("{}", "not an index with a weight_map (KeyError('weight_map'))"),
        ('{"weight_map": {}}', "its weight_map is empty"),
        ('{"weight_map": {"a": "../b"}}', "a is said to be in '../b', which is no file name"),
        ('{"weight_map": {"a": 1}}', "a is said to be in 1"),
    ],
)
def test_broken_index_is_named(tmp_path, index, said):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    message = refusal(tmp_path)
    assert "model.safetensors.index.json" in message
    assert said in message


@pytest.mark.parametrize(
    ("present", "said"),
    [
        ("pytorch_model.bin", "only PyTorch pickles (pytorch_model.bin)"),
        ("pytorch_model-00001-of-00002.bin", "save_pretrained"),
        ("model-00001-of-00002.safetensors", "neither model.safetensors nor model.safetensors.index.json"),
        ("config.json", "no weights; expected model.safetensors"),
    ],
)
def test_directory_without_safetensors_says_what_to_do(tmp_path, present, said):
    (tmp_path / present).write_bytes(b"")
    assert said in refusal(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_file_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    assert f"{name}: no file" in refusal(tmp_path)
    (tmp_path / name).rmdir()
    (tmp_path / name).symlink_to("gone")
    assert f"{name}: a link to gone, which is not there" in refusal(tmp_path)


def test_two_sets_of_weights_are_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    assert "two sets of weights, model.safetensors and the 1 file(s) that model.safetensors.index" in refusal(tmp_path)
    index.write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert "two sets" not in refusal(tmp_path)


def test_absent_directory_is_named(tmp_path):
    assert "nowhere: no such directory" in refusal(tmp_path / "nowhere")


def test_one_parameter_is_buffered_at_a_time(tmp_path, monkeypatch):
    """Though the names' order mixes the experts' two parameters."""
    write(tmp_path, tensors())
    put, buffered = loader.Filling.put, []

    def watched(self, name, tensor):
        put(self, name, tensor)
        buffered.append(len(self._buffers))

    monkeypatch.setattr(loader.Filling, "put", watched)
    load_safetensors(tmp_path, abstract(), sorted(NAMES, key=lambda n: (n.index or 0, n.names)))
    assert max(buffered) == 1


def test_progress_is_drawn_only_when_asked(tmp_path, capsys):
    write(tmp_path, tensors())
    load_safetensors(tmp_path, abstract(), NAMES)
    silent = capsys.readouterr()
    assert (silent.out, silent.err) == ("", "")
    check(load_safetensors(tmp_path, abstract(), NAMES, progress=True))
