import pytest

from helpers.isa import FLAGS, bf16_tier, cpu_flags


def cpuinfo(tmp_path, text):
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("flags", "tier"),
    [
        ("avx2 avx512f avx512_bf16 amx_tile amx_bf16 amx_int8", "AMX: "),
        ("avx2 avx512f avx512_vnni avx512_bf16", "without AMX"),
        ("avx2 avx512f avx512_vnni", "no native bf16"),
        ("fpu", "no native bf16"),
    ],
)
def test_tier_follows_the_flags(tmp_path, flags, tier):
    assert tier in bf16_tier(cpu_flags(cpuinfo(tmp_path, f"model name\t: x\nflags\t\t: {flags}\n")))


def test_a_flag_is_a_whole_word(tmp_path):
    found = cpu_flags(cpuinfo(tmp_path, "flags : avx512_bf16x xavx2 amx_tile\n"))
    assert [name for name, there in found.items() if there] == [FLAGS["amx_tile"]]


def test_a_machine_without_x86_flags_is_named(tmp_path):
    with pytest.raises(ValueError, match="not an x86 Linux"):
        cpu_flags(cpuinfo(tmp_path, "Features : neon\n"))
