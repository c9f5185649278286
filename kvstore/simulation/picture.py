"""Picture: plot hit ratios over sizes. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore.errors import KVStoreError

__all__ = ["check_picture", "draw"]

FORMATS = (".png", ".svg")


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn, before any work is done.

    Raises:
        KVStoreError: if the file is neither PNG nor SVG, its folder is missing, or matplotlib is.
    """
    if not path.parent.is_dir():
        raise KVStoreError(f"{path}: the folder {path.parent} does not exist")
    if path.suffix.lower() not in FORMATS:
        raise KVStoreError(f"{path}: a picture must end in one of: {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise KVStoreError(
            "a picture needs matplotlib: pip install 'kvstore-offload[plot]'"
        ) from error


def draw(path: Path, title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Plot `lines`, each of (size in chunks, hit ratio from 0 to 1), to a file.

    Raises:
        KVStoreError: as `check_picture`, or if the file cannot be written.
    """
    check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in lines.items():
        ordered = sorted(points)
        axes.plot(
            [size for size, _ in ordered],
            [100 * ratio for _, ratio in ordered],
            marker="o" if len(ordered) <= 40 else None,
            markersize=3,
            label=name,
        )
    axes.set_xscale("log")
    axes.set_xlabel("chunks")
    axes.set_ylabel("hit ratio, %")
    axes.set_ylim(bottom=0)
    # A file's name is no formula.
    axes.set_title(title, parse_math=False)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, bbox_inches="tight")
    except OSError as error:
        raise KVStoreError(f"{path}: cannot be written ({error.strerror})") from error
