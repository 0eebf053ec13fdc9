"""Reads prices.toml: what instances cost, and GPU speeds that others published. Readers edit it.

The notebook that uses it: ``11_cost``.
"""

import math
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from helpers import published
from helpers.tables import Table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("prices.toml")
MARKETS = ("on demand", "spot")
HOURS_PER_MONTH = 365 * 24 / 12


class PriceError(ValueError):
    """A price file with a key or a value that makes no sense; the message says where."""


@dataclass(frozen=True)
class Instance:
    """One row of the file. Prices are in its currency for an hour of one instance.

    ``processor`` is a CPU generation of ``helpers.published`` or a GPU, ``cores`` are physical.
    ``interrupted_per_month`` is assumed: the share of spot instances taken back within a month.
    ``verified`` says whether the on-demand price was read at ``source``.
    """

    name: str
    processor: str
    cores: int
    network_gbit: float
    on_demand: float
    spot: float
    interrupted_per_month: float
    verified: bool
    source: str

    def price(self, market: str) -> float:
        """For an hour "on demand" or "spot"; KeyError for another market."""
        return dict(zip(MARKETS, (self.on_demand, self.spot), strict=True))[market]

    @property
    def interruptions_per_hour(self) -> float:
        """Of one instance, at a constant rate: 1 - exp(-rate x month) is the share of a month."""
        return -math.log1p(-self.interrupted_per_month) / HOURS_PER_MONTH


@dataclass(frozen=True)
class Throughput:
    """A published speed of fine-tuning on one GPU; ``max_length`` is in tokens."""

    processor: str
    model: str
    max_length: int
    precision: str
    samples_per_second: float
    note: str
    source: str


@dataclass(frozen=True)
class Prices:
    """A whole price file; ``instances`` are found by name.

    ``disk_mib_per_second`` is how fast a disk that outlives its node takes a checkpoint.
    """

    region: str
    currency: str
    on_demand_date: date
    on_demand_source: str
    spot_date: date
    spot_source: str
    disk_mib_per_second: float
    disk_source: str
    instances: dict[str, Instance]
    throughputs: tuple[Throughput, ...]

    def table(self) -> Table:
        """One row for each instance, with the dates in the heads of the columns."""
        return Table(
            {
                "instance": its.name,
                "processor": its.processor,
                "cores": its.cores,
                "network, Gbit/s": its.network_gbit,
                f"on demand, {self.currency}/h, {self.on_demand_date}": its.on_demand,
                f"spot, an example, {self.currency}/h, {self.spot_date}": its.spot,
                "interrupted in a month, assumed": f"{its.interrupted_per_month:.0%}",
                "price": "verified" if its.verified else "UNVERIFIED",
            }
            for its in self.instances.values()
        )


def _is_number(value, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low < value < high


def _is_text(value) -> bool:
    return isinstance(value, str) and value.strip() != ""


TEXT = (_is_text, "a text in quotes")
ADDRESS = (lambda value: _is_text(value) and value.startswith("https://"), 'an "https://..."')
DATE = (lambda value: type(value) is date, "a date like 2026-02-09, without quotes")
POSITIVE = (lambda value: _is_number(value, 0, 1e6), "a number above 0, without quotes")
COUNT = (lambda value: type(value) is int and value >= 1, "a whole number from 1")
SHARE = (lambda value: value == 0 or _is_number(value, 0, 1), "a share from 0 to below 1")
TRUTH = (lambda value: isinstance(value, bool), "true or false")
LIST = (lambda value: isinstance(value, list), "a list")
TEXTS = (lambda value: isinstance(value, list) and all(map(_is_text, value)), "a list of texts")

RULES = {
    "region": TEXT,
    "currency": TEXT,
    "on_demand_date": DATE,
    "on_demand_source": ADDRESS,
    "spot_date": DATE,
    "spot_source": ADDRESS,
    "disk_mib_per_second": POSITIVE,
    "disk_source": ADDRESS,
    "gpus": TEXTS,
    "instances": LIST,
    "throughputs": LIST,
}
INSTANCE_RULES = {
    "name": TEXT,
    "processor": TEXT,
    "cores": COUNT,
    "network_gbit": POSITIVE,
    "on_demand": POSITIVE,
    "spot": POSITIVE,
    "interrupted_per_month": SHARE,
    "verified": TRUTH,
    "source": ADDRESS,
}
THROUGHPUT_RULES = {
    "processor": TEXT,
    "model": TEXT,
    "max_length": COUNT,
    "precision": TEXT,
    "samples_per_second": POSITIVE,
    "note": TEXT,
    "source": ADDRESS,
}


def _check(where: str, table, rules: dict) -> None:
    if not isinstance(table, dict):
        raise PriceError(f"{where}: expected keys and values, got {table!r}")
    for key in table.keys() - rules.keys():
        raise PriceError(f"{where}: unknown key {key!r}; allowed are {', '.join(rules)}")
    for key in rules.keys() - table.keys():
        raise PriceError(f"{where}: key {key!r} is missing; needed are {', '.join(rules)}")
    for key, (accepts, allowed) in rules.items():
        if not accepts(table[key]):
            raise PriceError(f"{where}: {key} = {table[key]!r} is refused; allowed is {allowed}")


def _check_processor(where: str, table: dict, allowed: list[str]) -> None:
    if table["processor"] not in allowed:
        raise PriceError(
            f"{where}: processor = {table['processor']!r} is refused; allowed are "
            f"{', '.join(allowed)}; a new GPU goes into the list gpus first"
        )


def load(file: Path = FILE) -> Prices:
    """Reads a price file. Raises PriceError, naming file, instance, key and allowed values."""
    file = Path(file)
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PriceError(f"{file}: can't be read as TOML: {error}") from error
    _check(str(file), content, RULES)
    gpus = content.pop("gpus")
    processors = [*published.cpu_generations(), *gpus]
    instances = {}
    for number, row in enumerate(content.pop("instances"), 1):
        name = row.get("name", number) if isinstance(row, dict) else number
        where = f"{file}, instance {name}"
        if isinstance(row, dict):
            row = {"source": content["on_demand_source"]} | row
        _check(where, row, INSTANCE_RULES)
        _check_processor(where, row, processors)
        if row["spot"] > row["on_demand"]:
            raise PriceError(
                f"{where}: spot = {row['spot']} is refused; allowed is at most on_demand = "
                f"{row['on_demand']}: above it, nobody would take spot"
            )
        if name in instances:
            raise PriceError(f"{where}: name = {name!r} stands in the file twice; keep one")
        instances[name] = Instance(**row)
    throughputs = content.pop("throughputs")
    for number, row in enumerate(throughputs, 1):
        where = f"{file}, throughput {number}"
        _check(where, row, THROUGHPUT_RULES)
        _check_processor(where, row, gpus)
    return Prices(
        **content,
        instances=instances,
        throughputs=tuple(Throughput(**row) for row in throughputs),
    )
