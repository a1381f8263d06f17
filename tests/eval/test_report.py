"""The report: every part that was measured is shown, missing ones are named, and bad news is told as such."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from regraft.errors import UserError
from regraft.eval import figures
from regraft.eval.report import report
from regraft.eval.results import Quality, Recall, Results, Sample, Speed
from regraft.eval.sections import verdict

SELECTION = {
    "by": "kl",
    "mixer": "window_linear",
    "num_layers": 4,
    "converted": [1, 2],
    "kept": [0, 3],
    "scores": {"0": 0.4, "1": 0.02, "2": 0.03, "3": 0.3},
    "meaning": "KL in nats per token",
    "tokens": 4096,
    "passes": 3.5,
    "seconds": 1.5,
}
METRICS = [{"stage": "align", "step": i, "tokens": 512 * i, "loss": 0.2 / i, "seconds": 0.5} for i in range(1, 21)]
VOID = {"meta", "br", "link", "img", "hr"}


def results(kl=0.02, recalled=0.95, model="a <b>bold</b> run"):
    made = Results(model=model, teacher="the-teacher")

    def quality(name, value, ratio):
        return Quality(name, "core", value, 0.001, 0.9, 20.0 * ratio, ratio, 40, 512, 20440)

    made.quality = [
        quality("teacher", 0.0, 1.0),
        quality("student", kl, 1.0 + kl),
        quality("sliding_window baseline", 0.03, 1.03),
        quality("interleave baseline", 0.3, 1.3),
    ]
    shares = (("teacher", 0.98), ("student", recalled), ("sliding_window baseline", 0.9))
    made.recall = [Recall(n, t, c, a, 0.01, 96) for n, a in shares for t in ("copy", "passkey") for c in (512, 1024)]
    made.speed = [
        Speed(n, c, 500.0, r, 0.1, 0.2, b * c * 1000, "float32", 3, 1)
        for c in (1024, 8192)
        for n, r, b in (("teacher", 5.0, 100), ("student", 9.0, 52))
    ]
    made.samples = [Sample("say </pre><script>hi</script>", "```\n<|im_start|>", "| plain |")]
    made.layers = {
        "num_layers": 4,
        "converted": [1, 2],
        "mixers": {i: {"name": "window_linear", "far_state_bytes": 500} for i in "12"},
    }
    made.protocol = {"text": "some text", "dtype": "float32", "ids": {"core": "abc"}, "lm_eval": {"limit": 50}}
    made.tasks = {
        "teacher": {"piqa": {"acc,none": 0.6, "acc_stderr,none": 0.02}, "wiki": {"word_perplexity,none": 21.5}},
        "student": {"piqa": {"acc,none": 0.57, "acc_stderr,none": "N/A"}, "wiki": {"word_perplexity,none": 22.0}},
    }
    return made


@pytest.fixture
def run_folder(tmp_path):
    """run_folder(name, results) -> a folder as `regraft run` leaves it."""

    def make(name="run", made=None):
        folder = tmp_path / name
        (folder / "final").mkdir(parents=True)
        (made or results()).save(folder / "results.json")
        (folder / "layers.json").write_text(json.dumps(SELECTION))
        for number, stage in ((0, "align"), (10, "finetune"), (2, "logits")):
            rows = "\n".join(json.dumps({**row, "stage": stage}) for row in METRICS)
            (folder / f"metrics-{number}-{stage}.jsonl").write_text(rows + "\n")
        checks = [{"name": "oracle", "passed": True}, {"name": "packed", "passed": False}]
        (folder / "verify.json").write_text(json.dumps({"passed": False, "checks": checks}))
        (folder / "recipe.yaml").write_text("# my comment\nname: x\n")
        return folder

    return make


class _Page(HTMLParser):
    """Ids, references, headings and tags left open."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.references, self.tags, self.open, self.headings = [], set(), set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            self.references |= set(
                re.findall(r"^#(.+)|url\(#(.+?)\)", value or "") and re.findall(r"#([^)\s]+)", value)
            )

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def test_the_page_shows_every_part_and_stands_alone(run_folder):
    text = report([run_folder()]).read_text()
    page = _Page(text)
    assert page.open == []
    assert page.headings[1:] == [
        "Quality",
        "Quality against cache",
        "Choice of layers",
        "Training",
        "Recall",
        "Cache and speed",
        "Benchmarks (lm-eval)",
        "Samples",
        "Verification",
        "Load it",
        "Recipe",
    ]
    assert not page.tags & {"script", "link", "img", "b"}, "nothing is loaded, and names are not markup"
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', text) and "@import" not in text
    assert len(page.ids) == len(set(page.ids)), "the figures share ids"
    assert page.references and page.references <= set(page.ids), "a figure points at something that is not there"
    assert figures.INK not in text.split("</style>")[1], "ink that would not follow the page into the dark"
    assert "&lt;|im_start|&gt;" in text and "# my comment" in text and "1 of 2 checks" in text and "packed" in text
    assert text.index("stage 0: align") < text.index("stage 2: logits") < text.index("stage 10: finetune")
    assert "0.570 ± 0.000" in text and "+0.500" in text, "benchmarks of both kinds"


def test_the_twin_has_the_same_parts_with_figures_as_files(run_folder):
    folder = run_folder()
    report([folder])
    twin = (folder / "report.md").read_text()
    for line in ("| student | core | 0.0200 ± 0.0010 |", "# my comment", "````\n```\n<|im_start|>\n````", "SLLS"):
        assert line in twin
    assert "&lt;b>bold" in twin and "<b>" not in twin
    named = re.findall(r"\]\((figures/.+?)\)", twin)
    assert sorted(named) == sorted(f"figures/{p.name}" for p in (folder / "figures").iterdir())
    assert len(named) == 6
    for name in named:
        ElementTree.fromstring((folder / name).read_bytes())


def test_the_same_results_give_the_same_bytes(run_folder):
    folder = run_folder()
    names = ("report.html", "report.md", "figures/recall.svg", "figures/layers.svg")
    report([folder])
    first = [(folder / name).read_bytes() for name in names]
    import matplotlib

    matplotlib.rcParams["axes.facecolor"] = "pink"  # somebody else's style must not show, and must survive
    report([folder])
    assert [(folder / name).read_bytes() for name in names] == first
    assert matplotlib.rcParams["axes.facecolor"] == "pink"
    matplotlib.rcParams["axes.facecolor"] = "white"


def test_the_verdict_tells_good_and_bad_news():
    good = verdict(results())
    assert "KL 0.0200" in good and "20440 predictions" in good and "Perplexity 1.020 x" in good
    assert "lower than that of an untrained sliding window on the same layers (0.0300)" in good
    assert "NOT" not in good and "BETTER" not in good
    assert "Recall at 512 tokens 95.0%, the teacher's 98.0%, the untrained window's 90.0%." in good
    assert "52.0% of the teacher's and it decodes 1.80 x" in good
    bad = verdict(results(kl=0.05, recalled=0.8))
    assert "NOT lower than that of an untrained sliding window on the same layers" in bad
    assert "the untrained window's 90.0%, which is BETTER" in bad
    assert "NOT clearly different from that of an untrained sliding window" in verdict(results(kl=0.0295))
    assert verdict(Results("a", "b")) == "Nothing was measured."


def test_what_is_not_there_is_left_out_and_named(tmp_path):
    bare = results()
    bare.speed, bare.recall, bare.tasks, bare.samples = [], [], {}, []
    bare.save(tmp_path / "results.json")
    text = report([tmp_path]).read_text()
    page = _Page(text)
    assert page.headings[1:] == ["Quality", "Load it"]
    for part in ("layers.json", "verify.json", "metrics-*.jsonl", "recipe.yaml", "recall", "speed", "lm-eval"):
        assert re.search(rf"Not (shown|measured)[^.]*{re.escape(part)}", text), part
    assert not list((tmp_path / "figures").iterdir())
    Results("m", "t").save(tmp_path / "results.json")
    assert "Nothing was measured." in report([tmp_path]).read_text()


def test_a_choice_without_scores_is_no_figure(run_folder):
    folder = run_folder()
    flat = {**SELECTION, "by": "uniform", "scores": {"0": 1.0, "1": 0.0, "2": 0.0, "3": 1.0}}
    (folder / "layers.json").write_text(json.dumps(flat))
    text = report([folder]).read_text()
    assert "Choice of layers" not in text and "Chosen by uniform." in text


def test_several_runs_share_a_figure_only_where_they_can_be_compared(run_folder, tmp_path):
    one, two = run_folder("one"), run_folder("two", results(kl=0.01, model="other"))
    text = report([one, two], tmp_path / "both").read_text()
    page = _Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert page.headings[1] == "Side by side" and page.headings.count("Quality") == 2
    assert "No common figure" not in text
    assert "other" in (tmp_path / "both" / "figures" / "runs.svg").read_text()
    assert {"0-recall.svg", "1-recall.svg"} <= {p.name for p in (tmp_path / "both" / "figures").iterdir()}
    elsewhere = results(model="third")
    elsewhere.protocol["ids"] = {"core": "another text"}
    text = report([one, run_folder("three", elsewhere)], tmp_path / "apart").read_text()
    assert "No common figure" in text and not (tmp_path / "apart" / "figures" / "runs.svg").exists()


@pytest.mark.parametrize("broken", ["none", "json", "newer", "keys", "layers"])
def test_folders_that_hold_no_run_are_refused(run_folder, broken):
    folder = run_folder()
    path = folder / "results.json"
    raw = json.loads(path.read_text())
    if broken == "none":
        path.unlink()
    elif broken == "json":
        path.write_text("{")
    elif broken == "newer":
        path.write_text(json.dumps({**raw, "format": 99}))
    elif broken == "keys":
        path.write_text(json.dumps({"format": 1}))
    else:
        (folder / "layers.json").write_text("{")
    with pytest.raises(UserError):
        report([folder])
    assert not (folder / "report.html").exists()


def test_labels_of_close_dots_do_not_overlap():
    size = 2**20
    points = [("teacher", 100 * size, 0.0)] + [(f"run {i}", (50 + i) * size, 0.01 + 1e-5 * i) for i in range(5)]
    drawn = ElementTree.fromstring(figures.quality_against_cache(points))
    texts = [e for e in drawn.iter("{http://www.w3.org/2000/svg}text") if (e.text or "").startswith("run ")]
    heights = [float(text.get("y")) for text in texts]
    assert len(heights) == 5
    gaps = [abs(a - b) for i, a in enumerate(heights) for b in heights[:i]]
    assert min(gaps) >= 9, "labels are 9 points high"
