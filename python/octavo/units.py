"""Numbers for people: sizes and counts with a unit."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Three digits with a decimal unit, as disks and downloads are sold: `93.1 MB`."""
    return _scaled(count, ("bytes", "kB", "MB", "GB", "TB", "PB"))


def format_count(count: float) -> str:
    """Three digits with the unit of model sizes: `135 M`, `7.62 B`."""
    return _scaled(count, ("", "k", "M", "B", "T")).rstrip()


def _scaled(count: float, units: tuple[str, ...]) -> str:
    scaled, place = float(count), 0
    while scaled >= 999.5 and place < len(units) - 1:
        scaled, place = scaled / 1000, place + 1
    digits = 0 if place == 0 or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:,.{digits}f} {units[place]}"
