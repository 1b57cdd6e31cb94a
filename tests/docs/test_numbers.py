"""
The numbers on the pages are those of the files in ``docs/results``.

Tables are written from the files. In the text of the results, a number must be in a table of its
section or in ``facts.csv``. The other pages quote cells of the tables, in the sentences of
``QUOTES``, or repeat a whole table; any other measured number fails.
"""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
spec = importlib.util.spec_from_file_location("result_tables", DOCS / "result_tables.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)

RESULTS = sorted((DOCS / "results").glob("*.md"))
PAGES = [DOCS.parent / "README.md", *(p for p in sorted(DOCS.glob("*.md")) if p.stem != "upstream")]
MARK = re.compile(r"^<!-- table: ([\w-]+) -->\n((?:\|.*\n)*)", re.M)
# A number that was measured has a decimal point, an error or a unit.
NUMBER = r"(?<![\w.,/^])-?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e-?\d+)?"
UNIT = r"(?: ?(?:nats|ms|s|seconds|minutes|hours|MiB|MB|GB|dB|%|times(?: as)?|of the time)\b| ± )"
MEASURED = re.compile(
    rf"({NUMBER})(?=(?:(?:, {NUMBER})*,? (?:and|to|or|instead of) {NUMBER})?{UNIT})"
)
DECIMAL = re.compile(r"(?<![\w.,/^])-?\d[\d,]*\.\d+")
VERSION = re.compile(
    r"(?:PyTorch|Pyro|Python|CUDA|NumPyro|torch|pyro-ppl|JAX) \(?\d[\d.]*(?: (?:to|and) \d[\d.]*)?"
)


def cell(name: str, row: str, column: str) -> str:
    return tables.read(name)(row, column)


def value(name: str, row: str, column: str, part: int = 0) -> float:
    """Return a number of a cell, without its error."""
    return float(
        re.findall(r"-?[\d,]*\d(?:\.\d+)?", cell(name, row, column))[part].replace(",", "")
    )


def prose(text: str) -> str:
    """Return the text of a page in one line, without blocks of code, tables of results, headings
    and link targets."""
    text = MARK.sub("", re.sub(r"^ *(```|:::).*?^ *\1$", "", text, flags=re.M | re.S))
    text = re.sub(r"^#+ .*$|<!--.*?-->", "", text, flags=re.M)
    return re.sub(r"\s+", " ", re.sub(r"\]\([^)]*\)", "]", text))


def measured(text: str) -> set[str]:
    """Return the measured numbers of a text without blocks."""
    text = VERSION.sub("", re.sub(r"`[^`]*`|\$[^$]*\$", "", text))
    return {m if isinstance(m, str) else m[0] for m in MEASURED.findall(text)} | set(
        DECIMAL.findall(text)
    )


def known(page: str, head: str, *numbers: str) -> tuple[str, ...]:
    """Return numbers that ``facts.csv`` has for a section."""
    assert set(numbers) <= facts()[page, head], head
    return numbers


def sections(text: str) -> list[tuple[str, str]]:
    """Return the headings of a page and their sections, which include the tables."""
    parts = re.split(r"^#+ (.*)$", text, flags=re.M)
    return list(zip(["", *parts[1::2]], parts[0::2], strict=True))


@pytest.mark.parametrize("path", [*PAGES, *RESULTS], ids=lambda p: p.stem)
def test_tables_are_those_of_the_files(path):
    text = path.read_text(encoding="utf-8")
    assert tables.with_tables(text) == text, "python docs/result_tables.py writes the tables"


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_results_have_no_other_table(path):
    assert not re.search(r"^\|", MARK.sub("", path.read_text(encoding="utf-8")), re.M)


def test_every_file_is_shown_and_has_its_origin():
    text = "".join(p.read_text(encoding="utf-8") for p in [*PAGES, *RESULTS])
    for path in sorted((DOCS / "results").glob("*.csv")):
        table = tables.read(path.stem)
        assert path.stem == "facts" or f"<!-- table: {path.stem} -->" in text, path.stem
        assert all(table[:3])
        assert all(len(row) == len(table.header) for row in table.rows)


def facts() -> dict[tuple[str, str], set[str]]:
    return {(page, head): set(n.split()) for page, head, n in tables.read("facts").rows}


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_the_text_of_the_results_has_numbers_of_its_section(path):
    known, text = facts(), path.read_text(encoding="utf-8")
    for head, section in sections(text):
        cells = "".join(body for _, body in MARK.findall(section))
        allowed = set(re.findall(NUMBER, cells)) | known.get((path.stem, head), set())
        allowed |= {n.lstrip("-") for n in allowed}
        assert measured(prose(section)) - allowed == set(), head


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_facts_are_on_their_page(path):
    text = dict(sections(path.read_text(encoding="utf-8")))
    for (page, head), numbers in facts().items():
        if page == path.stem:
            assert numbers <= measured(prose(text[head])), head


VOLATILITY = "stochastic volatility, simulated, 1,000"
# Log evidences that are known otherwise: the last column of the table.
KNOWN = {
    "eight schools": -31.31,
    "Gaussian process classifier": -65.01,
    "logistic regression": -55.26,
    "log-Gaussian Cox process": -888.47,
    "stochastic volatility, simulated": -256.77,
}


def of_choose() -> list[str]:
    def row(label: str, name: str, advice: str) -> str:
        columns = ("IWAE-100", "IWAE-1000", "SIS-10, 8 chains")
        cells = [
            f"{cell('posteriors', name, x)} in {cell('posteriors_time', name, x)} ms"
            for x in columns
        ]
        return f"| {label} | {cell('posteriors', name, 'ELBO')} | {' | '.join(cells)} | {advice} |"

    gaps = [value("posteriors", VOLATILITY, x) for x in ("IWAE-10", "IWAE-100", "IWAE-1000")]
    closed = [100 * (1 - gaps[1] / gaps[0]), 100 * (1 - gaps[2] / gaps[1])]
    iwae, *chains = (
        [value("mnist_hundred_epochs", name, "ten chains of 40 steps", seed) for seed in (0, 1)]
        for name in ("IWAE-10", "AIS-5, default", "SIS-10, default")
    )
    gains = [before - after for nlls in chains for before, after in zip(iwae, nlls, strict=True)]
    return [
        f"closed {min(closed):.0f} to {max(closed):.0f} % of the largest gap",
        f"by {min(gains):.1f} to {max(gains):.1f} nats",
        row(
            "logistic regression, 31 coefficients", "logistic regression, breast cancer, 31", "IWAE"
        ),
        row("stochastic volatility, 1,000 latents", VOLATILITY, "chains"),
        row(
            "Gaussian process classifier, 100 latents",
            "Gaussian process classifier, iris, 100",
            "rewrite the model",
        ),
        row(
            "classifier, written with a standard normal",
            "Gaussian process classifier, whitened",
            "ELBO or IWAE",
        ),
    ]


def of_chains_and_draws() -> list[str]:
    def sonar(column: str) -> float:
        return value("frontier", "sonar", column)

    def ring(chain: str) -> str:
        return cell("kernels_equal_cost", chain, "pPCA, digits, ring").split(", ")[2]

    mala, default = (
        ring("K = 9, `MALA()`, learned schedule"),
        ring("K = 5, `HMC(num_leapfrog=2, laziness=0.03)`, learned schedule: the default"),
    )
    work, name = {}, ""
    for row in tables.read("posterior_draws").rows:
        name = row[0] or name
        work[name, row[1]] = [float(n.replace(",", "") or "nan") for n in row[2:4]]
    names = ("logistic regression", "item response", "stochastic volatility, 200")
    seconds, gradients = (
        [
            work[n, "ELBO, 20 transitions of HMC"][i] / work[n, "jitted NUTS, 1000 draws"][i]
            for n in names
        ]
        for i in (0, 1)
    )
    longer = value("frontier_time", "8", "network") / value("frontier_time", "8", "default")
    gained = value("frontier_variants", "sonar, 8", "mass and network") - sonar("mass, 8")
    at_128 = value("frontier_transitions", "sonar, 128", "mass")
    return [
        f"(a gap of {mala} instead of {default} nats per datum, ",
        f"raises the ELBO from {sonar('ELBO'):.1f} to {sonar('full-rank ELBO'):.1f}",
        f"a mass matrix and 128 transitions to match it ({at_128:.1f})",
        f"with the full-rank guide gives {sonar('full-rank default, 8'):.1f}",
        f"this chain gives {sonar('mass, 8'):.1f}, and the default chain {sonar('default, 8'):.1f}",
        f"gains {gained:.1f} nats and makes a step {longer:.1f} times as long",
        f"[{seconds[0]:.2f} and {seconds[1]:.2f} of the time]",
        f"computes {min(gradients):.1f} to {max(gradients):.1f} times as many",
    ]


def of_migration() -> list[str]:
    pyro = {row[0]: row[1:] for row in tables.read("upstream").rows}
    lkj = [
        pyro[name][0]
        for name in ("`LKJCholesky`, 3 dims: mean weight of draws", "`LKJCholesky`, 4 dims")
    ]
    sylvester = pyro["`Sylvester`, 5 dims: largest error of the log determinant"][0]
    return [
        f"mean weight {lkj[0]} in three dims, {lkj[1]} in four",
        "a mean time of {} at rate 4; exact {} |".format(
            *pyro["`CoalescentTimes` at rate 4: mean time"]
        ),
        "mean cosine {}; exact {} |".format(*pyro["`SineBivariateVonMises`: mean cosine"]),
        "is wrong | {}; exact {} |".format(*pyro["`MixtureOfDiagNormals`: gradient of a logit"]),
        "the same | {}; exact {} |".format(*pyro["`MixtureOfDiagNormalsSharedCovariance`"]),
        f"off by up to {float(sylvester):.1f} nats",
        "with an AutoGuide | {}; exact {} |".format(
            *pyro["`Trace_ELBO` of padded series with an `AutoNormal`"]
        ),
        "mean log density {}; exact {} |".format(
            *pyro["`BatchNorm` in training mode, 3 dims: log density of ten draws"]
        ),
        "loss {}; -log p(x) is {} |".format(
            *pyro["`RenyiELBO` with an `AutoDiagonalNormal`: loss"]
        ),
    ]


def of_special_cases() -> list[str]:
    def row(label: str, k: str, column: str) -> str:
        cells = [cell("global_latents_4", k, column)]
        cells += [cell("global_latents_more", f"{n}, {k}", column) for n in (40, 400)]
        return f"| {label} | {' | '.join(cells)} |"

    exact = known(
        *(
            "reliability",
            "Global and local latents on small full data",
            "-6.378",
            "-61.338",
            "-607.407",
        )
    )
    difference = re.findall(r"[\d.]+", cell("relu", "SIS, underdamped", "ReLU: finite differences"))
    return [
        f"its gradient was {value('relu', 'SIS, underdamped', 'ReLU: gradient'):.2f}",
        f"finite differences gave {float(difference[0]):.2f} ± {float(difference[1]):.2f}",
        f"| exact | {' | '.join(exact)} |",
        row("K = 10", "10", "`TraceIWAE_ELBO(K)`"),
        row("K = 10, `joint=True`", "10", "with `joint=True`"),
        row("K = 1000", "1000", "`TraceIWAE_ELBO(K)`"),
        row("K = 1000, `joint=True`", "1000", "with `joint=True`"),
    ]


def of_the_figure() -> list[str]:
    near, far = tables.read("draws_or_chains").header[1::2]
    gaps = [
        value("draws_or_chains", name, column)
        for name, column in (
            *(("ELBO", near), ("IWAE-100", near)),
            *(("IWAE-1000", far), ("SIS-10, 8 chains", far)),
        )
    ]
    return [
        f"the ELBO is {gaps[0]:.1f} nats too low; 100 importance samples leave {gaps[1]:.1f}",
        f"1,000 draws still leave {gaps[2]:.0f} nats, eight chains {gaps[3]:.0f}",
    ]


def compiled_fractions() -> list[float]:
    return [
        value("quickstart_compiled", f"{name}, compiled", "ms/step")
        / value("quickstart_compiled", name, "ms/step")
        for name in ("SGVB", "IWAE-10", "SIS-5", "AIS-5")
    ]


def quoted(page: str) -> list[str]:
    """Return the sentences of a page that quote results, built from the files."""
    steps = compiled_fractions()
    compiling = cell("compiled_loop", "200", "compiling")
    white = [
        [abs(value("white_coordinates", name, column) - exact) for name, exact in KNOWN.items()]
        for column in ("white coordinates", "from the guide")
    ]
    memory = [cell("chain_memory", name, "memory") for name in ("reweighted", "full gradient")]
    pages = {
        "index": of_the_figure(),
        "README": [
            *of_the_figure(),
            f"makes a step {1 / max(steps):.1f} to {1 / min(steps):.1f} times as fast (quickstart)",
        ],
        "chains_and_draws": of_chains_and_draws(),
        "choose": of_choose(),
        "compile": [
            f"{min(steps):.2f} to {max(steps):.2f} of the time",
            f"and {compiling} for 200 time steps",
            "Compiling took {}, {}, {} and {} seconds".format(
                *known("speed", "A compiled training step", "4.6", "4.7", "16.8", "28.5")
            ),
        ],
        "costs": [
            "slowed down from {} s to {} s".format(
                *known("speed", "Denormal numbers on Intel processors", "0.8", "2.5")
            )
        ],
        "deploy": [
            "changed by at most {} nats".format(
                *known("devices", "Mixed precision on the CPU", "0.003")
            ),
            "{:.0f} to {} times as fast".format(
                *(float(n) if "." in n else n for n in known("devices", "On an H100", "2.2", "12"))
            ),
            f"{memory[0].removesuffix(' MB')} instead of {memory[1]}",
        ],
        "diagnose": [
            f"were within {max(white[0]):.2f} nats",
            f"up to {max(white[1]):.0f} nats too low",
        ],
        "migration": of_migration(),
        "papers": [
            "by {} nats per patch with uniform flips and by up to {} with informed ones".format(
                *known("papers", "Truncated posteriors", "2", "0.5")
            ),
        ],
        "results": [
            "a step takes {} to {} times as long".format(
                *known("speed", "Speed and memory", "1.2", "1.4")
            )
        ],
        "special_cases": of_special_cases(),
        "troubleshooting": [f"({compiling} for [200 time steps]"],
    }
    return pages.get(page, [])


# Settings, definitions and limits of the package, which nobody measured.
GIVEN = {
    # The first example prints this gap, and says itself that it is inexact.
    "README": ["The ELBO is 1.0 nats below", "about 80 seconds of CPU time"],
    "index": ["The ELBO is 1.0 nats below"],
    "recipes": ["below 0.7;"],
    "compile": ["or more than 1 MB of arrays"],
    "costs": ["blocks over 32 MiB"],
    "deploy": ["A bound of -500 nats"],
    "diagnose": [
        "below about 0.1 nats per weight",
        "below 0.5 | above 0.7",
        "0.9 for SIS, 0.8 for AIS",
    ],
    "glossary": ["weight (0.99)", "first draw (0.01)", "Above 0.7 an estimate"],
    "mathematics": [
        *("Above 0.7 neither", "Below 0.7 the error", "for example 0.13 at 1,000 draws"),
        *("errors is above 0.5", "| below 0.2 | 0.3 to 0.4 | 0.5 to 0.6 |"),
    ],
    "migration": ["scvi-tools 1.4 returns"],
    "papers": [
        *("an acceptance of 0.9", "{0.01, 0.02, 0.1}: 0.02 for AEVB", "0.01 for wake-sleep"),
        *("deviation of 0.01; N(0, 0.01) in the paper's notation is 0.1", "weight of 0.01"),
        "max(0.5, exp(-0.1 epoch))",
    ],
    "troubleshooting": ["a gap below 0.1 nats"],
}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_pages_quote_the_results(path):
    text = prose(path.read_text(encoding="utf-8"))
    for sentence in (*quoted(path.stem), *GIVEN.get(path.stem, [])):
        assert sentence in text, sentence
        text = text.replace(sentence, "")
    assert measured(text) == set(), "a measured number that no sentence above has"
