"""A profile as tables on a terminal."""

from rich.console import Console
from rich.table import Table

from jhybrid.profiler.run import Profile, Row


def print_profile(profile: Profile, console: Console) -> None:
    """Measured points, skipped points with their reasons, and how good the latency model is."""
    where, model = profile.head["machine"], profile.head["model"]
    console.print(
        f"{model['model']}: {model['num_parameters']:,} parameters on {where['cpu'] or where['device']}, "
        f"jax {where['jax']}"
    )
    if profile.measured:
        console.print(_measured(profile.measured))
    if profile.skipped:
        table = Table("skipped", "reason", "detail")
        for row in profile.skipped:
            table.add_row(row["point"], row["reason"], row["detail"])
        console.print(table)
    if profile.summary is None:
        console.print("not finished: run it again to go on")
        return
    for name, errors in (profile.summary["latency_errors"] or {}).items():
        if errors["points"]:
            console.print(
                f"latency model, {name.replace('_', ' ')}: {errors['points']} points, error {errors['mean']:.1%} on "
                f"average, {errors['largest']:.1%} at most, {errors['of_total']:+.1%} of the total"
            )


def _measured(rows: list[Row]) -> Table:
    one = rows[0]
    caption = f"{one['kv']} caches, state: {one['state_mode']}, medians and ranges of {one['repeats']} repeats"
    table = Table("point", "ms", "range", "floor ms", "tokens/s", caption=caption)
    for row in rows:
        low, high = row["spread"]
        tokens = row["batch"] if row["kind"] == "decode" else row["new"]
        table.add_row(
            row["point"],
            f"{row['seconds'] * 1e3:.2f}",
            f"{low * 1e3:.2f} - {high * 1e3:.2f}",
            f"{row['floor_seconds'] * 1e3:.2f}",
            f"{tokens / row['seconds']:.0f}",
        )
    return table
