"""Numbers that others published, with their sources; nothing here was measured by the course.

They live in published.json. The notebooks that use them: ``01_what_can_this_cpu_do`` (instances),
``02_bf16_and_amx`` (runs) and ``10_scaling`` (networks).
"""

import json
from pathlib import Path

from helpers.isa import FLAGS
from helpers.tables import Table

FILE = Path(__file__).with_name("published.json")


def _availability(flag: str, generations: list[dict[str, bool]]) -> str:
    found = {flags[flag] for flags in generations}
    return "depends" if len(found) == 2 else "yes" if found.pop() else "-"


def cpu_generations() -> dict[str, dict[str, bool]]:
    """Maps a CPU generation to its flags, in the form of ``isa.cpu_flags``."""
    generations = json.loads(FILE.read_text())["generations"]
    del generations["source"]
    return {
        name: {label: label in present for label in FLAGS.values()}
        for name, present in generations.items()
    }


def cloud_instances() -> Table:
    """One row for each family of cloud instances: CPU generations, key instructions, source.

    A family that may run on several generations has an instruction ("yes"), lacks it ("-"), or
    it "depends" on the machine one is given.
    """
    generations = cpu_generations()
    rows = Table()
    for instance in json.loads(FILE.read_text())["instances"]:
        flags = [generations[name] for name in instance["generations"]]
        rows.append(
            {
                "cloud": instance["cloud"],
                "family": instance["family"],
                "CPU": " or ".join(instance["generations"]),
                "AVX-512 BF16": _availability("AVX-512 BF16", flags),
                "AMX bf16": _availability("AMX bf16", flags),
                "source": instance["source"],
            }
        )
    return rows


def runs(task: str) -> Table:
    """The published fine-tuning runs of "squad", "mrpc" or "qqp"; times in seconds.

    Raises KeyError for a task without any.
    """
    found = Table(run for run in json.loads(FILE.read_text())["runs"] if run["task"] == task)
    if not found:
        raise KeyError(f"no published runs of {task!r}; there are squad, mrpc and qqp")
    return found


def gradient_bytes(model: str) -> float:
    """Bytes of a published model's gradients in fp32."""
    return 4 * json.loads(FILE.read_text())["parameters"][model]["parameters"]


def samples(task: str) -> int:
    """Training samples of "squad" (questions), "mrpc" or "qqp"."""
    return json.loads(FILE.read_text())["workloads"][task]["samples"]


def networks() -> dict[str, float]:
    """Bytes/s that a cloud says of its networks, by what it says it of."""
    found = json.loads(FILE.read_text())["networks"]
    return {name: its["gbit"] * 1e9 / 8 for name, its in found.items()}
