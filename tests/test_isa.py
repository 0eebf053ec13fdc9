import errno
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import isa
from helpers.isa import FLAGS, IsaError, bf16_tier, cpu_flags, dispatched, parse_verbose

ICE_LAKE = "avx2 avx512f avx512_vnni hypervisor"
SAPPHIRE_RAPIDS = "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8"


def cpuinfo(tmp_path, text):
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("flags", "tier"),
    [
        (SAPPHIRE_RAPIDS, "AMX: "),
        ("avx2 avx512f avx512_vnni avx512_bf16", "without AMX"),
        (ICE_LAKE, "no native bf16"),
        ("avx2", "no native bf16"),
        ("fpu", "no native bf16"),
    ],
)
def test_tier_follows_the_flags(tmp_path, flags, tier):
    assert tier in bf16_tier(cpu_flags(cpuinfo(tmp_path, f"model name\t: x\nflags\t\t: {flags}\n")))


@pytest.mark.parametrize(
    ("flags", "cap", "native"),
    [
        (SAPPHIRE_RAPIDS, "", True),
        (SAPPHIRE_RAPIDS, isa.ICE_LAKE, False),
        (SAPPHIRE_RAPIDS, "avx2", False),
        (SAPPHIRE_RAPIDS, "AVX512_CORE_BF16", True),
        (SAPPHIRE_RAPIDS, "no such name", True),
        ("avx512f avx512_bf16", "", True),
        (ICE_LAKE, "", False),
        (ICE_LAKE, "DEFAULT", False),
    ],
)
def test_bf16_is_native_where_the_cpu_has_it_and_no_cap_forbids_it(tmp_path, flags, cap, native):
    found = cpu_flags(cpuinfo(tmp_path, f"flags : {flags}\n"))
    assert isa.native_bf16(found, cap) is native


def test_a_flag_is_a_whole_word(tmp_path):
    found = cpu_flags(cpuinfo(tmp_path, "flags : avx512_bf16x xavx2 amx_tile\n"))
    assert [name for name, there in found.items() if there] == [FLAGS["amx_tile"]]


def test_a_machine_without_x86_flags_is_named(tmp_path):
    arm = cpuinfo(tmp_path, "Features : neon\n")
    for check in (cpu_flags, isa.under_hypervisor):
        with pytest.raises(ValueError, match="not an x86 Linux"):
            check(arm)
    assert isa.cpu_model(arm) == "unknown"


def test_model_and_hypervisor_are_read(tmp_path):
    virtual = cpuinfo(tmp_path, f"model name : Intel(R) Xeon(R): X\nflags : {ICE_LAKE}\n")
    assert isa.cpu_model(virtual) == "Intel(R) Xeon(R): X"
    assert isa.under_hypervisor(virtual)
    assert not isa.under_hypervisor(cpuinfo(tmp_path, f"flags : {SAPPHIRE_RAPIDS}\n"))


@pytest.mark.parametrize(
    ("release", "knows"),
    [
        ("5.15.0-1034-aws", False),
        ("5.16.0", True),
        ("5.4.0", False),
        ("6.1.0-13-amd64", True),
        ("10.0", True),
    ],
)
def test_kernels_hand_out_tiles_from_5_16(release, knows):
    assert isa.kernel_knows_amx(release) == knows


def test_an_unreadable_kernel_version_is_said():
    with pytest.raises(ValueError, match="cannot read a kernel version out of 'linux'"):
        isa.kernel_knows_amx("linux")


def planted_kernel(supported, refusal=0, granted=True):
    """An arch_prctl that knows three codes; ``supported`` None is a kernel before 5.16."""

    def arch_prctl(code, argument):
        if supported is None:
            return errno.EINVAL
        if code == 0x1021:
            argument._obj.value = supported
        elif code == 0x1022:
            argument._obj.value = granted << 18
        elif code == 0x1023:
            assert argument.value == 18
            return refusal
        return 0

    return arch_prctl


@pytest.mark.parametrize(
    ("kernel", "works", "detail"),
    [
        (planted_kernel(None), False, "Linux 5.16"),
        (planted_kernel(0b111), False, "hypervisor masks"),
        (planted_kernel(1 << 18, refusal=errno.EPERM), False, "refuses the tiles: EPERM"),
        (planted_kernel(1 << 18, granted=False), False, "not granted"),
        (planted_kernel(3 << 17), True, "granted"),
    ],
)
def test_tile_permission_tells_the_cases_apart(monkeypatch, kernel, works, detail):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    found = isa.tile_permission(kernel)
    assert found.works == works
    assert detail in str(found)


def test_tile_permission_asks_nothing_of_another_architecture(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert str(isa.tile_permission(planted_kernel(None))) == "no AMX on aarch64"


def test_this_machines_tile_permission_agrees_with_its_flags():
    if isa.tile_permission().works:
        assert cpu_flags()["AMX tiles"]


def line(kernel, primitive="matmul", source="src:bf16::blocked:ab::f0", ms="0.5"):
    return (
        f"onednn_verbose,v1,primitive,exec,cpu,{primitive},{kernel},undef,"
        f"{source} wei:bf16::blocked:ab::f0,attr-scratchpad:user,,8x8:8x8,{ms}"
    )


HEADER = """\
onednn_verbose,v1,info,oneDNN v3.7.1 (commit 8d263e6)
onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with Intel DL Boost
onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,exec_time
"""


def test_a_log_is_summed_up_by_kernel_and_the_output_kept():
    log = HEADER + "\n".join(
        [
            "epoch 1",
            line("brg_matmul:avx10_1_512_amx"),
            line("brg_matmul:avx10_1_512_amx", ms="1.5"),
            line("jit:uni", "reorder", "src:f32::blocked:ab::f0", "9"),
            '{"loss": 1}' + line("ref:any", ms="0.25"),
        ]
    )
    found = parse_verbose(log)
    assert [(k.primitive, k.implementation, k.source) for k in found.kernels] == [
        ("reorder", "jit:uni", "f32"),
        ("matmul", "brg_matmul:avx10_1_512_amx", "bf16"),
        ("matmul", "ref:any", "bf16"),
    ]
    assert (found.kernels[1].calls, found.kernels[1].milliseconds) == (2, 2.0)
    assert found.output == 'epoch 1\n{"loss": 1}'
    assert found.json == {"loss": 1}
    assert found.isa == "Intel AVX-512 with Intel DL Boost"
    assert found.unreadable == 0


@pytest.mark.parametrize(
    ("logged", "amx", "bf16"),
    [
        (line("brg_matmul:avx512_core_amx"), True, True),
        (line("brgemm_bwd_w:avx10_1_512_amx", "inner_product", "src:bf16:a:blocked"), True, True),
        (line("brg_matmul:avx512_core_bf16"), False, True),
        (line("gemm:jit:bf16"), False, True),
        (line("brg_matmul:avx512_core", source="src:f32::blocked:ab::f0"), False, False),
        (line("jit:avx512_core_amx_copy", "reorder"), False, False),  # moves data only
        ("", False, False),
    ],
)
def test_amx_and_bf16_are_those_of_the_products(logged, amx, bf16):
    found = parse_verbose(logged)
    assert (found.uses_amx, found.uses_bf16) == (amx, bf16)


@pytest.mark.parametrize(
    "broken",
    [
        line("x")[:-20],
        line("x", ms="fast"),
        "onednn_verbose,v1,primitive,exec,cpu",
        "onednn_verbose,exec,cpu,matmul,brgemm:avx512_core,undef,src_f32::blocked:ab:f0,,,8x8,0.1",
    ],
)
def test_unreadable_lines_are_counted_and_told(broken):
    found = parse_verbose(broken + "\n" + line("brg_matmul:avx512_core_amx"))
    assert found.unreadable == 1
    assert len(found.kernels) == 1
    assert "1 lines of its log could not be read" in found._repr_html_()


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]))))
def test_any_output_survives_without_the_log(texts):
    own = [word for text in texts for word in text.splitlines() if "onednn_verbose" not in word]
    mixed = [part for word in own for part in (line("k:a"), word)]
    found = parse_verbose("\n".join(mixed) + "\n")
    assert found.output == "\n".join(own)
    assert sum(kernel.calls for kernel in found.kernels) == len(own)


def test_a_dispatch_is_shown_as_a_table():
    html = parse_verbose(line("<b>:amx"))._repr_html_()
    assert "<td>&lt;b&gt;:amx</td><td>bf16</td><td>1</td>" in html
    assert "no rows" in parse_verbose("")._repr_html_()


def test_output_that_is_not_json_is_refused():
    with pytest.raises(IsaError, match="not JSON: 'hello'"):
        _ = parse_verbose("hello").json


def test_the_cap_reaches_a_fresh_process_and_inherited_ones_do_not(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    show = "import os; print(os.getpid(), os.environ['ONEDNN_MAX_CPU_ISA'], os.environ.get('X'))"
    first = dispatched(show, max_isa=isa.ICE_LAKE, env={"X": "1"}).output.split()
    second = dispatched(["-c", show]).output.split()
    assert first[0] != second[0]
    assert first[1:] == ["AVX512_CORE_VNNI", "1"]
    assert second[1:] == ["DEFAULT", "None"]


def test_an_unknown_cap_is_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match="'AVX512_AMX' is refused; allowed are .*AVX10_1_512_AMX"):
        dispatched("", max_isa="AVX512_AMX")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "killed by SIGILL"),
        ("print('almost'); raise SystemExit(3)", "exit code 3[^$]*almost"),
        ("1 / 0", "exit code 1[^$]*ZeroDivisionError"),
    ],
)
def test_a_failing_program_is_told_with_its_log(program, message):
    with pytest.raises(IsaError, match=message):
        dispatched(program)


def is_running(pid):
    """Waits a little for the end: the kill is sent, its effect may come a moment later."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.02)
    return True


def test_a_hanging_program_is_stopped_with_what_it_started(tmp_path):
    pid = tmp_path / "pid"
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(IsaError, match="did not end within 2 s"):
        dispatched(program, timeout=2)
    assert not is_running(int(pid.read_text()))


def test_long_logs_do_not_block_the_program():
    found = dispatched(f"for _ in range(3000): print({line('brg_matmul:avx512_core_amx')!r})")
    assert found.kernels[0].calls == 3000


ALL = dict.fromkeys(FLAGS.values(), True)
NO_AMX = ALL | {"AMX tiles": False, "AMX int8": False, "AMX bf16": False}


@pytest.mark.parametrize(
    ("flags", "program", "works", "detail"),
    [
        (NO_AMX, "raise SystemExit('must not run')", False, "not advertised"),
        (ALL, f"print({line('brg_matmul:avx10_1_512_amx')!r})", True, "works"),
        (ALL, f"print({line('gemm:jit:bf16')!r})", False, "not used: the product ran on gemm:jit"),
        (ALL, "print('nothing')", False, "the product ran on no oneDNN kernel"),
        (ALL, "import os; os.kill(os.getpid(), 4)", False, "faults: the program was killed by SIG"),
        (ALL, "assert False, 'wrong result'", False, "faults: the program ended with exit code 1"),
        (ALL, "import time; time.sleep(60)", False, "faults: the program did not end within 3 s"),
    ],
)
def test_the_probe_tells_the_cases_apart(flags, program, works, detail):
    found = isa.probe_amx(flags, program, timeout=3)
    assert found.works == works
    assert detail in str(found)


BF16_PRODUCT = """
import os, torch
a = torch.ones(64, 64).bfloat16()
a @ a
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"  # too late: it was read once
print((a @ a).sum().item())
"""


def test_a_real_product_obeys_the_cap_and_reads_it_once():
    if not cpu_flags()["AVX-512 F"]:
        pytest.skip("PyTorch sends bf16 to oneDNN only on CPUs with AVX-512")
    capped = dispatched(BF16_PRODUCT, max_isa=isa.ICE_LAKE)
    assert float(capped.output) == 64**3
    assert capped.uses_bf16 and not capped.uses_amx
    assert [kernel.calls for kernel in capped.products] == [2]
    assert "bfloat16" not in capped.isa


def test_the_libraries_say_what_they_see():
    capability = isa.library_view(env={"ATEN_CPU_CAPABILITY": "avx2"})
    assert any(value == "AVX2" for value in capability.values())
    assert any(name.startswith("PyTorch") for name in capability)
    assert any(name.startswith("IPEX") for name in capability)


def test_importing_is_light():
    code = "import sys, helpers.isa, helpers.plots, helpers.published\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert not {"torch", "matplotlib", "numpy"} & set(loaded.split())
    assert "helpers.isa" in loaded
