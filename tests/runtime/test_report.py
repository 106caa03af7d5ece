"""The page: self-contained, well-formed, escaped, and only of what verifies."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from evidence import build, write

from patchkit.errors import ConfigurationError, PatchkitError
from patchkit.runtime.artifact import ArtifactError, merge_artifacts, verify_artifact
from patchkit.runtime.canonical import digest_of
from patchkit.runtime.report import write_report

VOID = {"meta", "line", "rect", "br"}


class Balance(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page(tmp_path: Path, source: Path) -> tuple[str, str]:
    target = tmp_path / "page.html"
    write_report(source, target)
    html = target.read_text()
    reader = Balance()
    reader.feed(html)
    assert reader.open == []
    return html, " ".join(reader.text)


def test_a_run(tmp_path):
    html, text = page(tmp_path, write(tmp_path))
    assert "exact: 120 tokens, 0 mismatches in both phases" in text
    assert 'class="verdict good"' in html
    assert "rollout = stock (unpatched)" in text
    assert "worker 0" in text
    assert html.count("<svg") == 2
    assert "First mismatches" not in text


def test_nothing_is_fetched_and_nothing_runs(tmp_path):
    html, _ = page(tmp_path, write(tmp_path))
    assert "<script" not in html
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://""", html)


def test_a_run_with_mismatches(tmp_path):
    html, text = page(tmp_path, write(tmp_path, bad=True))
    assert 'class="verdict bad"' in html
    assert "First mismatches" in text


def test_unreviewed_is_said(tmp_path):
    html, text = page(tmp_path, write(tmp_path, unreviewed=["m:f"]))
    assert 'class="verdict good"' not in html
    assert text.count("UNREVIEWED") == 2
    assert "m:f" in text


def test_what_comes_from_elsewhere_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    artifact = build(contract={"profile": {"name": evil}}, unreviewed=[evil])
    artifact.note(**{evil: evil})
    html, text = page(tmp_path, artifact.write(tmp_path / "a.json"))
    assert "<script" not in html
    assert text.count(evil) >= 3


def test_a_merged_artifact(tmp_path):
    runs = [write(tmp_path, "a.json"), write(tmp_path, "b.json", tokens=20)]
    _, text = page(tmp_path, merge_artifacts(runs, tmp_path / "m.json"))
    assert "a.json" in text
    assert "b.json" in text


def test_without_a_baseline_or_rounds(tmp_path):
    _, text = page(tmp_path, write(tmp_path, versions=0))
    assert "incomplete" in text


def test_what_does_not_verify_has_no_page(tmp_path):
    path = write(tmp_path)
    path.write_text(path.read_text().replace('"toy"', '"Toy"', 1))
    with pytest.raises(ArtifactError):
        write_report(path, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_page_never_replaces_what_it_shows(tmp_path):
    path = write(tmp_path)
    merged = merge_artifacts([path], tmp_path / "all.json")
    for source, target in ((path, path), (merged, merged), (merged, path)):
        with pytest.raises(ConfigurationError, match="part of the evidence"):
            write_report(source, target)
    assert verify_artifact(merged).exact


def test_a_place_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_report(write(tmp_path), tmp_path)


@pytest.mark.parametrize("merged", [False, True])
def test_a_document_with_parts_of_another_form_is_refused(tmp_path, merged):
    """Whoever alters one and repairs its digest gets a refusal, or an honest page."""
    path = write(tmp_path)
    source = merge_artifacts([path], tmp_path / "all.json") if merged else path
    whole = json.loads(source.read_text())
    for at in places(whole):
        for value in (None, [], "x", {}):
            document = copy.deepcopy(whole)
            part = document
            for key in at[:-1]:
                part = part[key]
            part[at[-1]] = value
            del document["digest"]
            document["digest"] = digest_of(document)
            (tmp_path / "altered.json").write_text(json.dumps(document))
            with suppress(PatchkitError):
                write_report(tmp_path / "altered.json", tmp_path / "page.html")


def places(part, at=(), depth=4):
    """Where a document's parts stand, the first of each list."""
    keys = list(part) if isinstance(part, dict) else [0] if part and isinstance(part, list) else []
    for key in keys if depth else ():
        if key != "digest":
            yield (*at, key)
            yield from places(part[key], (*at, key), depth - 1)


def test_the_command(tmp_path):
    path = write(tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from patchkit.cli import main; main()",
            "report",
            str(path),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run.html").exists()
