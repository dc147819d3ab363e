import re
from html.parser import HTMLParser

import pytest

from jaxforge.tools.plan.plan import Plan, plan
from jaxforge.tools.plan.plan_page import page, picture
from jaxforge.tools.plan.timeline import Span
from jaxforge.tools.plan.topology import Topology
from tests.conftest import tiny_config

CPUS = Topology.parse("cpu:8")


class Text(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.words = []
        self.feed(html)

    def handle_data(self, data):
        self.words.append(data)

    def __str__(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def html():
    mesh = {"pp": 2, "dp_shard": 2, "tp": 2}
    return page(plan(tiny_config(distributed=mesh, train={"grad_accum_steps": 4}), CPUS))


def test_plan_page_shows_the_plan(html):
    text = str(Text(html))
    assert "pp 2 x dp_shard 2 x tp 2" in text
    assert "layers.attention.q_proj.weight" in text
    assert re.search(r"collective-permute pp", text)
    assert "1f1b: 2 stages, 4 microbatches" in text
    assert re.search(r"parameters \d", text)


def test_plan_page_is_self_contained(html):
    assert not re.findall(r"""(?:src|href)=|url[(]|@import""", html)
    assert html.count("<svg") == html.count("</svg>") >= 1


def test_refused_plan_has_a_page():
    text = str(Text(page(Plan(CPUS, errors=["a <b> & c"]))))
    assert "does not run" in text
    assert "a <b> & c" in text


def test_spans_too_thin_to_see_are_merged():
    spans = [Span(f"s{i}", "memory", "device", i * 1e-6, 1e-6) for i in range(10_000)]
    drawn = picture("many", [*spans, Span("long", "products", "device", 0.01, 1.0)], 1.01)
    assert drawn.count("<rect") < 30
    assert "long: products" in drawn
