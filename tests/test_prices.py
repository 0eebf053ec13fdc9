import math
from datetime import date

import pytest

from helpers import prices, published
from helpers.prices import PriceError

FILE = """
region = "r"
currency = "USD"
on_demand_date = 2026-01-02
on_demand_source = "https://example.org/on-demand"
spot_date = 2026-01-03
spot_source = "https://example.org/spot"
disk_mib_per_second = 125
disk_source = "https://example.org/disk"
gpus = ["T4"]
instances = [
  {name = "big", processor = "Ice Lake", cores = 32, network_gbit = 25, on_demand = 2.5, spot = 1, interrupted_per_month = 0.1, verified = true},
  {name = "gpu", processor = "T4", cores = 2, network_gbit = 2.5, on_demand = 0.5, spot = 0.5, interrupted_per_month = 0, verified = false, source = "https://example.org/gpu"},
]
[[throughputs]]
processor = "T4"
model = "m"
max_length = 384
precision = "fp16"
samples_per_second = 50
note = "n"
source = "https://example.org/speed"
"""  # noqa: E501


def load(tmp_path, text=FILE):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return prices.load(file)


def test_a_file_is_read(tmp_path):
    found = load(tmp_path)
    assert (found.currency, found.on_demand_date) == ("USD", date(2026, 1, 2))
    assert found.instances["big"].price("on demand") == 2.5
    assert found.instances["big"].price("spot") == 1
    assert found.instances["big"].source == "https://example.org/on-demand"
    assert found.instances["gpu"].source == "https://example.org/gpu"
    assert found.throughputs[0].samples_per_second == 50
    big, gpu = found.table()
    assert big["on demand, USD/h, 2026-01-02"] == 2.5
    assert [row["price"] for row in (big, gpu)] == ["verified", "UNVERIFIED"]


def test_a_month_at_the_hourly_rate_interrupts_the_stated_share(tmp_path):
    big, gpu = load(tmp_path).instances.values()
    assert math.exp(-big.interruptions_per_hour * 730) == pytest.approx(0.9)
    assert gpu.interruptions_per_hour == 0


def test_another_market_has_no_price(tmp_path):
    with pytest.raises(KeyError, match="auction"):
        load(tmp_path).instances["big"].price("auction")


def test_the_published_instances_have_prices():
    found = prices.load()
    names = {run["instance"] for task in ("mrpc", "squad") for run in published.runs(task)}
    assert names <= found.instances.keys()
    assert {its.processor for its in found.throughputs} <= {
        its.processor for its in found.instances.values()
    }


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("spot = 1,", "spott = 1,", "instance big: unknown key 'spott'; allowed are name"),
        ("cores = 32, ", "", "instance big: key 'cores' is missing; needed are name"),
        ("cores = 32", 'cores = "32"', "instance big: cores = '32' is refused.*whole number"),
        ("cores = 32", "cores = 0", "instance big: cores = 0"),
        ("on_demand = 2.5", 'on_demand = "2.5"', "instance big: on_demand = '2.5'.*without quotes"),
        ("on_demand = 2.5", "on_demand = 2,5", "can't be read as TOML"),
        ("on_demand = 2.5", "on_demand = nan", "instance big: on_demand = nan"),
        ("spot = 1,", "spot = -1,", "instance big: spot = -1.*above 0"),
        ("spot = 1,", "spot = 3,", "instance big: spot = 3.*at most on_demand = 2.5"),
        ("month = 0.1", "month = 1.0", "interrupted_per_month = 1.0.*from 0 to below 1"),
        ("month = 0.1", "month = 10", "instance big: interrupted_per_month = 10"),
        ("verified = true", 'verified = "yes"', "instance big: verified = 'yes'.*true or false"),
        ('name = "gpu"', 'name = "big"', "instance big: name = 'big' stands in the file twice"),
        ('name = "big"', "name = 3", "instance 3: name = 3.*text in quotes"),
        ('name = "big", ', "", "instance 1: key 'name' is missing"),
        ('"Ice Lake"', '"Ice Lakes"', "instance big: processor = 'Ice Lakes'.*Ice Lake, Sapphire"),
        ('"https://example.org/gpu"', '"me"', "instance gpu: source = 'me'.*https"),
        ("instances = [", "instances = [3,", "instance 1: expected keys and values, got 3"),
        ("region =", "regions =", "mine.toml: unknown key 'regions'; allowed are region"),
        ('currency = "USD"', "", "mine.toml: key 'currency' is missing"),
        ("2026-01-02", '"2026-01-02"', "mine.toml: on_demand_date.*without quotes"),
        ("2026-01-02", "2026-13-02", "can't be read as TOML"),
        ("disk_mib_per_second = 125", "disk_mib_per_second = 0", "disk_mib_per_second = 0"),
        ('gpus = ["T4"]', 'gpus = "T4"', "mine.toml: gpus = 'T4'.*list of texts"),
        ("[[throughputs]]", "[throughputs]", "mine.toml: throughputs = .*a list"),
        ('\nprocessor = "T4"', '\nprocessor = "T5"', "throughput 1: processor = 'T5'.*gpus first"),
        ("samples_per_second", "samples_per_minute", "throughput 1: unknown key 'samples_per_min"),
    ],
)
def test_a_typo_is_refused_with_file_place_and_reason(tmp_path, before, after, said):
    assert FILE.count(before) >= 1
    with pytest.raises(PriceError, match=said) as refused:
        load(tmp_path, FILE.replace(before, after, 1))
    assert str(tmp_path / "mine.toml") in str(refused.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(PriceError, match="nowhere.toml: can't be read.*No such file"):
        prices.load(tmp_path / "nowhere.toml")
    file = tmp_path / "mine.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PriceError, match="mine.toml: can't be read"):
        prices.load(file)
