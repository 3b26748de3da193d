"""Chips against their published figures, slice names against the documentation's tables."""

import copy
import dataclasses
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.checks import HardwareError
from hardware.chip_files import chip_from_table, load_chip
from hardware.chips import CHIPS, Chip, get_chip
from hardware.shapes import wrap_of
from hardware.slices import Slice, legal_slices
from tests.hardware import reference

# Peaks per chip against which utilisations are published (Google Cloud documentation), FLOP/s.
PUBLISHED_PEAKS = {
    "v2": 45e12,
    "v3": 123e12,
    "v4": 275e12,
    "v5e": 197e12,
    "v5p": 459e12,
    "v6e": 918e12,
    "v7": 2307e12,
}
CHIPS_FILE = reference.load("chips.json")


def test_every_chip_has_a_published_peak():
    assert {*PUBLISHED_PEAKS, "v1"} == {*CHIPS}  # v1 has integers alone


@pytest.mark.parametrize("name", PUBLISHED_PEAKS)
def test_peak(name):
    assert CHIPS[name].peak_flops("bf16") == pytest.approx(PUBLISHED_PEAKS[name], rel=0.021)


@pytest.mark.parametrize("name", CHIPS)
def test_geometry_times_clock_is_the_peak_or_half_of_it_from_v6e_on(name):
    chip = CHIPS[name]
    factor = 2 if chip.year >= CHIPS["v6e"].year else 1  # two published arrays make half of the published peak
    assert chip.mxu_clock_hz == pytest.approx(factor * chip.clock_hz, rel=0.005)


@pytest.mark.parametrize("name", CHIPS)
def test_every_figure_has_a_source(name):
    chip = CHIPS[name]
    for figure in dataclasses.fields(Chip):
        if figure.name not in ("name", "sources"):
            assert len(chip.source(figure.name)) > 3, figure.name
            assert chip.source(figure.name) != "not given", figure.name


def number(entry):
    value = entry["value"] if isinstance(entry, dict) else entry
    return float(str(value).split()[0])


@pytest.mark.parametrize("name", PUBLISHED_PEAKS)
def test_figures_agree_with_the_reference(name):
    entry = {e["chip"]: e for e in reference.need(CHIPS_FILE, "chips.json")["chips"]}.get(name)
    if entry is None:
        pytest.skip("newer than the reference")
    chip = CHIPS[name]
    assert chip.peak_flops("bf16") == number(entry["peak_bf16_tflops_chip"]) * 1e12
    assert chip.cores_per_chip == number(entry["cores_per_chip"])
    assert chip.hbm_bytes_per_second == number(entry["hbm_gbps_chip"]) * 1e9
    in_gib = "GiB" in str(entry["hbm_gb_chip"]["value"])  # elsewhere GB or GiB; the docs round v5p's 95.74 GiB down
    size = number(entry["hbm_gb_chip"]) * (2**30 if in_gib else 1e9)
    assert chip.hbm_bytes == pytest.approx(size, rel=0.011 if in_gib else 0.08)
    assert chip.ici_bytes_per_second == number(entry["ici_gbps_link_one_way"]) * 1e9
    assert chip.ici_links == number(entry["ici_links"]) == 2 * len(chip.pod_shape)
    assert chip.vmem_bytes_per_core == number(entry["vmem_mib_core"]) * 2**20
    assert chip.cmem_bytes == number(entry.get("cmem_mib_chip", 0)) * 2**20
    assert f"{chip.mxu_rows}x{chip.mxu_columns}" == entry["mxu"]["value"]
    assert chip.usd_per_chip_hour in [number(price) for price in entry["price_usd_chip_hour"].values()]
    for dtype in ("int8", "fp8", "int4"):
        want = entry.get(dtype)
        assert chip.peak(dtype) == (None if want is None else number(want) * 1e12)
    for figure, want in (("clock_hz", "clock_mhz"), ("mxus_per_core", "mxu_per_core")):
        if entry[want] is not None:
            assert getattr(chip, figure) == number(entry[want]) * (1e6 if want == "clock_mhz" else 1)


@pytest.mark.parametrize(
    ("name", "chips", "cores", "devices", "shape", "wrap", "hosts"),
    [  # docs.cloud.google.com/tpu/docs, tables of accelerator types; 1909.09756 for v3
        ("v2-8", 4, 8, 8, (2, 2), (False, False), 1),
        ("v2-512", 256, 512, 512, (16, 16), (True, True), 64),
        ("v3-32", 16, 32, 32, (4, 4), (False, False), 4),
        ("v3-1024", 512, 1024, 1024, (16, 32), (False, True), 128),
        ("v3-2048", 1024, 2048, 2048, (32, 32), (True, True), 256),
        ("v4-8", 4, 8, 4, (2, 2, 1), (False,) * 3, 1),
        ("v4-128", 64, 128, 64, (4, 4, 4), (True,) * 3, 16),
        ("v4-8192", 4096, 8192, 4096, (16, 16, 16), (True,) * 3, 1024),
        ("v4-4x4x8", 128, 256, 128, (4, 4, 8), (True,) * 3, 32),
        ("v5p-1024", 512, 1024, 512, (8, 8, 8), (True,) * 3, 128),
        ("v5p-12288", 6144, 12288, 6144, (16, 16, 24), (True,) * 3, 1536),
        ("v5p-8960", 4480, 8960, 4480, (8, 20, 28), (True,) * 3, 1120),
        ("v5e-1", 1, 1, 1, (1, 1), (False, False), 1),
        ("v5litepod-8", 8, 8, 8, (2, 4), (False, False), 1),
        ("v5e-256", 256, 256, 256, (16, 16), (True, True), 32),
        ("V6e-128", 128, 128, 128, (8, 16), (False, True), 16),
        ("v4-12x12x24", 3456, 6912, 3456, (12, 12, 24), (True,) * 3, 864),
        ("v4-6912", 3456, 6912, 3456, (12, 12, 24), (True,) * 3, 864),
        ("v5p-13824", 6912, 13824, 6912, (12, 24, 24), (True,) * 3, 1728),
        ("v7x-8", 4, 8, 8, (2, 2, 1), (False,) * 3, 1),
        ("tpu7x-128", 64, 128, 128, (4, 4, 4), (True,) * 3, 16),
        ("2*v5e-256", 512, 512, 512, (16, 16), (True, True), 64),
        ("v1-1", 1, 1, 1, (1,), (False,), 1),
    ],
)
def test_slices(name, chips, cores, devices, shape, wrap, hosts):
    s = Slice(name)
    assert (s.chips, s.cores, s.devices, s.torus_shape, s.wrap, s.hosts) == (
        chips,
        cores,
        devices,
        shape,
        wrap,
        hosts,
    )
    assert hash(s) == hash(Slice(name))
    assert s == Slice(name)


@pytest.mark.parametrize(
    ("kind", "offered"),
    [("v2", 7.48), ("v3", 15.48), ("v4", 30.75), ("v5e", 15.75), ("v5p", 95.74), ("v6e", 31.25), ("v7", 94.7)],
)
def test_programs_are_offered_less_hbm_than_is_soldered(kind, offered):
    """GiB per device, as XLA's out-of-memory messages and allocator limits in public threads state them."""
    chip = CHIPS[kind]
    assert chip.usable_hbm_bytes_per_device / 2**30 == pytest.approx(offered, abs=1e-3)
    assert f"{offered}" in chip.source("hbm_reserved_bytes")
    assert 0.9 * chip.hbm_bytes_per_device < chip.usable_hbm_bytes_per_device < chip.hbm_bytes_per_device
    assert Slice(legal_slices(kind)[0]).usable_hbm_bytes_per_device == chip.usable_hbm_bytes_per_device


def test_per_device_figures():
    s = Slice("v3-8")
    assert s.hbm_bytes_per_device == 16 * 2**30
    assert s.peak_flops_per_device == 61.5e12
    assert s.hbm_bytes_per_second_per_device == 450e9
    assert s.usd_per_hour == 8.0  # cloud.google.com/tpu/pricing
    pod = Slice("2*v5e-256")
    assert (pod.slices, pod.single, pod.peak_flops()) == (2, Slice("v5e-16x16"), 512 * 197e12)
    assert pod.hbm_bytes == 512 * 16 * 2**30
    assert Slice("v1-1").peak_flops_per_device == 91.75e12
    assert Slice("v1-1").usd_per_hour is None


@pytest.mark.parametrize("kind", CHIPS)
def test_every_legal_name_is_a_slice_and_its_shape_too(kind):
    names = legal_slices(kind)
    for name in names:
        s = Slice(name)
        assert s.chips == math.prod(s.torus_shape) <= s.chip.max_slice_chips
        assert s.single.torus_shape == s.torus_shape
        assert name.endswith(f"-{s.cores if s.chip.name_counts == 'cores' else s.chips}")
    assert Slice(names[-1]).chips == CHIPS[kind].max_slice_chips


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("v3-7", "counts cores); the nearest are v3-8, v3-16, v3-32"),
        ("v5e-17", "nearest are v5e-4, v5e-8, v5e-16"),
        ("v5e-5x5", "nearest are v5e-4x8, v5e-4x4, v5e-8x8"),
        ("v4-4x4x5", "nearest are v4-4x4x4, v4-4x4x8"),
        ("v4-4x4", "its torus has 3 axes, not 2"),
        ("v5p-20000", "v5p-17920"),
        ("v9-8", "unknown chip 'v9'; known chips are v1, v2"),
        ("v5e-0x4", "is not a slice of v5e"),
        ("v4-4x4x256", "is not a slice of v4; the nearest are"),
        ("v5p-4x4x32", "is not a slice of v5p; the nearest are"),
        ("v7-4x4x28", "is not a slice of v7; the nearest are"),
        ("v3-٨", "is not a slice name"),
        ("٢*v5e-256", "is not a slice name"),
        ("v3-" + 5000 * "9", "is not a slice name"),
        ("0*v5e-4", "at least 1, not 0"),
        ("v5e--4", "is not a slice name"),
        ("v5e64", "is not a slice name; did you mean 'v5e-64'?"),
        ("2*TPU v4 4x4x8", "did you mean '2*v4-4x4x8'?"),
        ("", "is not a slice name"),
        (8, "is not a slice name"),
        (None, "is not a slice name"),
    ],
)
def test_illegal_names(name, part):
    with pytest.raises(HardwareError) as fault:
        Slice(name)
    assert part in str(fault.value)


def test_a_slice_is_what_it_is_whatever_it_is_called():
    assert Slice(" V3-8 ") == Slice("v3-8")
    assert str(Slice(" V3-8 ")) == str(Slice("v3-8"))
    assert Slice("v5e-256") == Slice("v5e-16x16") == Slice("v5litepod-256")
    assert hash(Slice("v5e-256")) == hash(Slice("v5e-16x16"))
    assert Slice("v5e-256") not in (Slice("v5e-128"), Slice("2*v5e-256"), Slice("v6e-256"))
    assert Slice("v5e-8x16") != Slice("v5e-16x8")


def test_the_whole_v5p_pod():
    """16x20x28 is the pod (jax-ml/scaling-book tpus.md); 6144 chips are the most that are offered."""
    pod = Slice("v5p-16x20x28")
    assert (pod.chips, pod.wrap, pod) == (8960, (True,) * 3, Slice("v5p-17920"))
    assert Slice("v5p-28x16x20").chips == 8960
    assert "6144" in pod.chip.source("max_slice_chips")


def test_a_chip_of_another_kind_is_refused():
    mine = dataclasses.replace(CHIPS["v5e"], name="Mine")
    assert Slice("mine-16", mine).chip is mine
    assert Slice("v5litepod-16", CHIPS["v5e"]) == Slice("v5e-16")
    with pytest.raises(HardwareError, match="is one of 'v9', the chip given is 'Mine'; write Mine-16"):
        Slice("v9-16", mine)


@given(st.sampled_from(sorted(CHIPS)), st.integers(-5, 20000))
def test_any_number_is_a_slice_or_one_clear_error(kind, count):
    name = f"{kind}-{count}"
    if name in legal_slices(kind):
        assert Slice(name).name == name
    else:
        with pytest.raises(HardwareError, match=name):
            Slice(name)


@given(st.sampled_from(sorted(CHIPS)), st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_any_shape_is_a_slice_or_one_clear_error(kind, sides):
    try:
        s = Slice(f"{kind}-{'x'.join(map(str, sides))}")
    except HardwareError:
        return
    assert s.wrap == wrap_of(s.chip, s.torus_shape)
    assert s.chips <= s.chip.max_slice_chips


OWN = {
    "name": "own", "cores_per_chip": 1, "devices_per_chip": 1, "clock_hz": 1e9, "mxus_per_core": 1,
    "mxu_rows": 8, "mxu_columns": 8, "peak_bf16_flops": 128e9,
    "vmem_bytes_per_core": 2**20, "hbm_bytes": 2**30,
    "hbm_bytes_per_second": 1e11, "ici_links": 4, "ici_bytes_per_second": 1e10, "pod_shape": (4, 6),
    "max_slice_chips": 24, "chips_per_host": 2,
}  # fmt: skip


def test_own_chip_and_its_slices():
    chip = Chip(**OWN, wrap_axis=6)
    s = Slice("own-3x6", chip)
    assert (s.chips, s.hosts, s.wrap, s.usd_per_hour) == (18, 9, (False, True), None)
    assert chip.source("clock_hz") == "not given"
    with pytest.raises(HardwareError, match="not a slice of own"):
        Slice("own-5x6", chip)
    with pytest.raises(HardwareError, match="no published int8 rate; it has bf16"):
        chip.peak_flops("int8")


def test_override_a_figure():
    fast = dataclasses.replace(CHIPS["v3"], hbm_bytes_per_second=2e12)
    assert Slice("v3-8", fast).hbm_bytes_per_second_per_device == 1e12


def test_multipod_of_2020():
    """4096 chips as 128 x 32, a mesh in its long axis: Kumar et al., arXiv:2011.03641."""
    pods = dataclasses.replace(CHIPS["v3"], pod_shape=(128, 32), max_slice_chips=4096)
    s = Slice("v3-128x32", pods)
    assert (s.chips, s.cores, s.wrap) == (4096, 8192, (False, True))
    with pytest.raises(HardwareError, match="not a slice of v3"):
        Slice("v3-128x32")


def test_toml(tmp_path):
    file = tmp_path / "chip.toml"
    file.write_text(
        'name = "mine"\nbase = "v4"\nhbm_bytes = 1000\nhbm_reserved_bytes = 100\npod_shape = [8, 8, 8]\n'
        '[sources]\nhbm_bytes = "a guess"\n'
    )
    chip = load_chip(file)
    assert (chip.name, chip.hbm_bytes, chip.pod_shape, chip.mxus_per_core) == ("mine", 1000, (8, 8, 8), 4)
    assert chip.source("hbm_bytes") == "a guess"
    assert chip.usable_hbm_bytes_per_device == 900
    assert chip.source("clock_hz") == CHIPS["v4"].source("clock_hz")
    assert chip.source("pod_shape") == "not given"
    file.write_text("name = ")
    with pytest.raises(HardwareError, match="cannot read a chip"):
        load_chip(file)
    with pytest.raises(HardwareError, match="cannot read a chip"):
        load_chip(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"hbm_bytes": -1}, "hbm_bytes must be an integer >= 1, not -1"),
        ({"hbm_reserved_bytes": 2**30}, "hbm_bytes is 1073741824, hbm_reserved_bytes 1073741824; give both figures"),
        ({"clock_hz": float("nan")}, "clock_hz must be a finite number > 0, not nan"),
        ({"ici_bytes_per_second": float("inf")}, "ici_bytes_per_second must be a finite number >= 0"),
        ({"mxu_rows": 1.5}, "mxu_rows must be an integer >= 1, not 1.5"),
        ({"mxu_rows": True}, "not True"),
        ({"peak_bf16_flops": None}, "at least one of peak"),
        ({"devices_per_chip": 2}, "devices_per_chip 2, cores_per_chip 1"),
        ({"name_counts": "pods"}, "'cores' or 'chips', not 'pods'"),
        ({"wrap_axis": 4, "wrap_cube": 4}, "not both"),
        ({"pod_shape": (4, 0)}, "pod_shape[1]"),
        ({"pod_shape": 4}, "sequence of integers"),
        ({"hbm_efficiency": 1.2}, "at most 1, not 1.2"),
        ({"name": "a b"}, "chip name"),
        ({"ici_bytes_per_second": 0.0}, "where there are links"),
    ],
)
def test_bad_chips(change, part):
    with pytest.raises(HardwareError) as fault:
        Chip(**{**OWN, **change})
    assert part in str(fault.value)


def test_bad_tables_and_lookups():
    with pytest.raises(HardwareError, match="'hbm_byte'; did you mean 'hbm_bytes'"):
        chip_from_table({"name": "x", "base": "v4", "hbm_byte": 3})
    with pytest.raises(HardwareError, match="missing ici_bytes_per_second, name; give them"):
        chip_from_table({k: v for k, v in OWN.items() if k not in ("name", "ici_bytes_per_second")})
    with pytest.raises(HardwareError, match="missing name; give"):
        chip_from_table({"base": "v4", "mxus_per_core": 8})
    with pytest.raises(HardwareError, match="sources name no figure 'hbm_byte'; did you mean 'hbm_bytes'"):
        chip_from_table({"name": "x", "base": "v4", "sources": {"hbm_byte": "a guess"}})
    with pytest.raises(HardwareError, match="vpu_bf16 must be true or false, not 'no'"):
        chip_from_table({"name": "x", "base": "v4", "vpu_bf16": "no"})
    with pytest.raises(HardwareError, match="a table of figure -> value, not None"):
        chip_from_table(None)
    with pytest.raises(HardwareError, match="sources must be a table"):
        chip_from_table({**OWN, "sources": 3})
    with pytest.raises(HardwareError, match="unknown chip 'v0'"):
        get_chip("v0")
    with pytest.raises(HardwareError, match="named by a string"):
        get_chip(3)
    with pytest.raises(KeyError, match=r"^unknown chip 'v9'; known chips are v1, v2"):
        CHIPS["v9"]
    assert CHIPS["trillium"] is CHIPS["v6e"]
    assert "trillium" not in CHIPS
    for args, figures in ((("v3",), {"nam": "v3"}), (("v3",), {}), ((), {"name": "v3"}), (([],), {})):
        with pytest.raises(
            HardwareError, match=r"all its figures by name \(.*\); hardware\.CHIPS\['v3'\] is a published"
        ):
            Chip(*args, **figures)
    assert copy.copy(CHIPS["v3"]) == pickle.loads(pickle.dumps(CHIPS["v3"])) == CHIPS["v3"]
    assert repr(pickle.loads(pickle.dumps(Slice("v3-8")))) == "Slice('v3-8')"
    with pytest.raises(HardwareError, match="no figure 'clock'"):
        CHIPS["v4"].source("clock")
    with pytest.raises(HardwareError, match="unknown MXU dtype 'fp16'"):
        CHIPS["v4"].peak("fp16")
    with pytest.raises(HardwareError, match="must be a Chip"):
        Slice("v3-8", "v3")


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("v5e-1", ["1 chip ", "1 core,", "1 device,", "1 host"]),
        ("v3-8", ["4 chips ", "8 cores,", "8 devices,", "1 host"]),
    ],
)
def test_slices_count_one_part_in_the_singular(name, counts):
    shown = str(Slice(name))
    assert [count for count in counts if count not in f"{shown}\n"] == []
    assert "hosts" not in shown
