"""Operations on the roofline of a device: flops per byte of HBM against flops per second."""

from __future__ import annotations

from meshlib.core.text import count_text
from meshlib.estimation import Estimate
from meshlib.estimation.views.profile import UNIT_OF
from meshlib.report.links import PageAnchors
from meshlib.report.markup import paragraph, section, text
from meshlib.report.svg import Picture, Scale

LARGEST, SMALLEST = 9.0, 2.5  # radius in pixels
SHOWN = 200  # points drawn, those with most flops


def roofline(est: Estimate, anchors: PageAnchors) -> str:
    """The section; "" for a program without products."""
    picture = roofline_picture(est, anchors)
    if not picture:
        return ""
    ridge = est.slice.peak_flops_per_device / est.slice.hbm_bytes_per_second_per_device
    caption = paragraph(
        f"Each disc is a product; its area is its share of time ≈. Right of {text(f'{ridge:.0f}')} flops per byte the "
        "MXU is the limit, left of it HBM. Flops and bytes are exact, rates modelled."
    )
    if any(p.flops_per_second > p.attainable_flops_per_second for p in est.roofline()):
        caption += paragraph("Above the roof: operands that are still in VMEM, or prefetched during earlier kernels.")
    return section("roofline", "Roofline of operations", caption, picture)


def roofline_picture(est: Estimate, anchors: PageAnchors) -> str:
    """The picture alone."""
    seconds = {row.name: row.total_seconds for row in est.rows if row.mxu_flops}
    points = sorted((p for p in est.roofline() if p.hbm_bytes), key=lambda p: -seconds.get(p.name, 0.0))[:SHOWN]
    if not points:
        return ""
    rate = est.slice.hbm_bytes_per_second_per_device
    peak = max(p.attainable_flops_per_second for p in points)
    peak = max(peak, est.slice.peak_flops_per_device)
    ridge = peak / rate
    low = min(ridge / 8, *(p.intensity for p in points)) / 1.5
    high = max(ridge * 8, *(p.intensity for p in points)) * 1.5
    least = min(low * rate, *(p.flops_per_second for p in points)) / 1.5
    picture = Picture(460, 320, label="roofline of one device")
    across = Scale((low, high), (picture.left, picture.right), log=True)
    up = Scale((least, peak * 1.6), (picture.bottom, picture.top), log=True)
    picture.axis_below(across, count_text, "flops per byte of HBM =")
    picture.axis_left(up, lambda f: f"{count_text(f)}/s")
    corner = max(low, least / rate)
    roof = [(across(corner), up(corner * rate)), (across(ridge), up(peak)), (across(high), up(peak))]
    picture.path(roof, "roof", title=f"{count_text(rate)}B/s of HBM, {count_text(peak)} flops/s")
    longest = max(seconds.values())
    for p in sorted(points, key=lambda p: -seconds.get(p.name, 0.0)):
        radius = max(SMALLEST, LARGEST * (seconds.get(p.name, 0.0) / longest) ** 0.5)
        about = (
            f"{p.name}: {p.intensity:.4g} flops a byte, {count_text(p.flops_per_second)} flops/s, bound by {p.bound}"
        )
        href, op = anchors.href(p.name), anchors.op(p.name)
        picture.circle(
            across(p.intensity), up(p.flops_per_second), radius, f"u-{UNIT_OF[p.bound].lower()} dot", about, href, op
        )
        anchors.show(p.name, "roofline", "roofline")
    return str(picture)
