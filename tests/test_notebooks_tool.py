"""tools.notebooks: right courses stay untouched, each breach is one line, and mending loses no text."""

from __future__ import annotations

import copy
import json
import re

import jupytext
import nbformat
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_course import FIRST, SECOND, load, make_course, save, snapshot

from tools import notebooks, percent
from tools.notebook_policy import POLICY
from tools.publication import Publication

COLAB = "https://colab.research.google.com/github/octo/course/blob/main"
COLAB_CELL = {
    "cell_type": "markdown",
    "metadata": {"id": "view-in-github", "colab_type": "text"},
    "source": [
        '<a href="https://colab.research.google.com/github/somebody/fork/blob/patch-1/Copy_of_01.ipynb" '
        'target="_parent"><img src="https://colab.research.google.com/assets/colab-badge.svg" alt="Open In Colab"/></a>'
    ],
}


@pytest.fixture
def course(tmp_path):
    return make_course(tmp_path / "course")


def lines(root):
    return [str(problem) for problem in notebooks.check_all(root)]


def code_cell(data):
    return next(cell for cell in data["cells"] if cell["source"] and "nvidia-smi" in "".join(cell["source"]))


def test_a_right_course_has_no_problems_and_no_command_changes_a_byte(course, capsys):
    before = snapshot(course)
    assert lines(course) == []
    for command in (["check"], ["check", "--fix"], ["update"], ["adopt"], ["update", "--force", FIRST]):
        assert notebooks.main(command, course) == 0
    assert snapshot(course) == before
    assert "2 lessons in notebooks/ keep the policy." in capsys.readouterr().out


def test_what_a_right_notebook_holds(course):
    data = load(course)
    nbformat.validate(data)
    metadata = data["metadata"]
    assert metadata["accelerator"] == "GPU"
    assert metadata["colab"] == {"gpuType": "T4", "provenance": [], "toc_visible": True}
    assert metadata["kaggle"] == {
        "accelerator": "nvidiaTeslaT4",
        "isGpuEnabled": True,
        "isInternetEnabled": True,
    }
    assert metadata["kernelspec"]["name"] == "python3"
    assert (data["nbformat"], data["nbformat_minor"]) == (4, 5)
    first, setup, _, stored, plain = data["cells"]
    assert f"({COLAB}/notebooks/{FIRST}.ipynb)" in "".join(first["source"])
    assert setup["metadata"] == {"cellView": "form", "jupyter": {"source_hidden": True}, "tags": ["setup"]}
    assert 'REPOSITORY, REF, VERSION, EXTRAS = "octo/course", "main", "0.1.0", ""\n' in setup["source"]
    assert stored["outputs"] and stored["execution_count"] == 2
    assert plain["outputs"] == [] and plain["execution_count"] is None
    assert "".join(plain["source"]).startswith("!nvidia-smi\n")


def test_the_header_states_the_policy():
    metadata = jupytext.reads(percent.HEADER + "# %%\n1\n", fmt="py:percent").metadata
    for key in ("accelerator", "colab", "kaggle", "kernelspec"):
        assert metadata[key] == POLICY["metadata"][key]
    stated = metadata["jupytext"]["notebook_metadata_filter"].split(",")
    assert {"accelerator", "colab", "kaggle", "kernelspec"} < set(stated)


# Each breach: how it is made, what its line says. All of these --fix mends.


def personal_metadata(data):
    data["cells"].insert(0, copy.deepcopy(COLAB_CELL))
    cell = code_cell(data)
    user = {"displayName": "Ada Lovelace", "userId": "0123"}
    cell["metadata"] = {"executionInfo": {"user": user}, "id": "abc", "outputId": "def", "colab": {}}
    data["metadata"]["colab"] |= {"name": "Copy of 01", "include_colab_link": True, "authorship_tag": "ABX9"}


def widgets(data):
    data["metadata"]["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}


def no_preset(data):
    del data["metadata"]["accelerator"]
    data["metadata"]["colab"]["gpuType"] = "A100"


def no_kaggle(data):
    del data["metadata"]["kaggle"]


def no_kernelspec(data):
    data["metadata"]["kernelspec"]["name"] = "my-env"


def wrong_badge(data):
    data["cells"][0]["source"] = [
        line.replace(f"notebooks/{FIRST}", f"notebooks/{SECOND}") for line in data["cells"][0]["source"]
    ]


def foreign_badge(data):
    data["cells"][0]["source"] = [line.replace("/octo/", "/fork/") for line in data["cells"][0]["source"]]


def second_row(data):
    row = Publication("octo/course").badge_row(f"notebooks/{FIRST}.ipynb")
    data["cells"][2]["source"] += ["\n", "\n", row]


def no_badge(data):
    data["cells"][0]["source"] = [line for line in data["cells"][0]["source"] if "colab" not in line]


def stored_output(data):
    text = ["x" * 1_000_000 + "\n"] * 3
    code_cell(data)["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}]


def executed(data):
    code_cell(data)["execution_count"] = 7


def duplicate_ids(data):
    data["cells"][3]["id"] = data["cells"][2]["id"]


def invalid_id(data):
    data["cells"][3]["id"] = "not valid\n☃"


def no_ids(data):
    data["nbformat_minor"] = 4
    for cell in data["cells"]:
        del cell["id"]


def setup_edited(data):
    data["cells"][1]["source"] = ["!pip install evil"]


def setup_gone(data):
    del data["cells"][1]


def tags_changed(data):
    code_cell(data)["metadata"]["tags"] = ["raises-exception"]


def indented(data):
    data["cells"][0]["unknown"] = 1


BREACHES = [
    (
        personal_metadata,
        r"ipynb: metadata.colab holds authorship_tag, include_colab_link, name, which saving left there",
    ),
    (personal_metadata, r"ipynb: cell 6 \(\w+\): metadata colab, executionInfo, id, outputId, which saving left"),
    (personal_metadata, r"ipynb: cell 1 \(no id\): a badge that opens something else, not this file"),
    (widgets, r"ipynb: metadata.widgets is stored, which breaks GitHub's viewer"),
    (no_preset, r"ipynb: metadata.accelerator \(the T4 preset\) is missing"),
    (no_preset, r"ipynb: metadata.colab \(the T4 preset\) is not what it should be"),
    (no_kaggle, r"ipynb: metadata.kaggle \(Kaggle's T4\) is missing"),
    (no_kernelspec, r"ipynb: metadata.kernelspec is not what it should be"),
    (wrong_badge, rf"ipynb: cell 1 \(\w+\): a badge that opens notebooks/{SECOND}.ipynb, not this file"),
    (foreign_badge, r"ipynb: cell 1 \(\w+\): a badge row that leads elsewhere than octo/course at main"),
    (second_row, r"ipynb: cell 3 \(\w+\): a second badge row"),
    (no_badge, r"ipynb: cell 1: no badge row"),
    (stored_output, r"ipynb: cell 5 \(\w+\): a stored output, but no tag nbval-check-output"),
    (executed, r"ipynb: cell 5 \(\w+\): an execution count, but no tag"),
    (duplicate_ids, r"ipynb: cell 4 \(\w+\): the id of an earlier cell"),
    (invalid_id, r"ipynb: cell 4 \(not valid\\n☃\): no valid cell id"),
    (no_ids, r"ipynb: nbformat 4.4, not 4.5, which has cell ids"),
    (no_ids, r"ipynb: cell 2 \(no id\): no valid cell id"),
    (setup_edited, r"ipynb: cell 2 \(\w+\): a setup cell that is not the generated one"),
    (setup_gone, r"ipynb: no setup cell"),
    (tags_changed, r"ipynb: cell 5 \(\w+\): tags or form settings that differ from the .py's"),
    (indented, r"ipynb: cell 1 \(\w+\): not written the way the tools write it"),
]


@pytest.mark.parametrize(("breach", "line"), BREACHES, ids=[f"{b.__name__}-{n}" for n, (b, _) in enumerate(BREACHES)])
def test_a_breach_is_named_in_one_line_and_mended(course, capsys, breach, line):
    good = snapshot(course)
    data = load(course)
    breach(data)
    save(course, data)
    broken = snapshot(course)

    assert notebooks.main(["check"], course) == 1
    said = capsys.readouterr().err
    assert snapshot(course) == broken, "checking wrote something"
    assert re.search(f"^notebooks/{FIRST}\\.{line}.*; .*check --fix` mends it$", said, re.M), said
    assert "Ada" not in said and "0123" not in said
    assert all(text.startswith(f"notebooks/{FIRST}.ipynb: ") for text in said.splitlines())

    assert notebooks.main(["check", "--fix"], course) == 0
    after = {name: content for name, (content, _) in snapshot(course).items()}
    before = {name: content for name, (content, _) in good.items()}
    if breach in (duplicate_ids, invalid_id, no_ids, setup_gone):  # an id that is lost cannot come back
        ids = re.compile(rb'"id": "[^"]+"')
        after, before = ({n: ids.sub(b"", c) for n, c in files.items()} for files in (after, before))
    assert after == before


@pytest.mark.parametrize("given", [{}, {"id": "same"}], ids=["none", "duplicates"])
def test_ids_that_are_made_anew_are_the_same_each_time(course, given):
    texts = []
    for _ in range(2):
        data = load(course)
        for cell in data["cells"]:
            cell.pop("id", None)
            cell |= given
        save(course, data)
        notebooks.fix(course)
        texts.append(load(course))
    assert texts[0] == texts[1]
    assert len({cell["id"] for cell in texts[0]["cells"]}) == 5


# Files that are no notebooks


NOT_NOTEBOOKS = {
    "not JSON": (b"<<<<<<< HEAD\n{}\n", "not JSON"),
    "deep": (b"[" * 200_000, "not JSON"),
    "list": (b"[]", "JSON, but no notebook of format 4"),
    "object": (b'{"a": 1}', "JSON, but no notebook of format 4"),
    "format 3": (b'{"nbformat": 3, "worksheets": [], "cells": []}', "JSON, but no notebook of format 4"),
    "cell": (b'{"nbformat": 4, "cells": [3]}', "a notebook whose cell 1 is no object"),
    "type": (b'{"nbformat": 4, "cells": [{"cell_type": "x"}]}', "cell 1 is neither code, Markdown nor raw"),
    "source": (b'{"nbformat": 4, "cells": [{"cell_type": "code", "source": 3}]}', "cell 1 has no source"),
    "outputs": (
        b'{"nbformat": 4, "cells": [{"cell_type": "code", "source": "", "outputs": [{}]}]}',
        "cell 1 has outputs that are none",
    ),
    "surrogate": (b'{"nbformat": 4, "cells": [{"cell_type": "raw", "source": "\\ud800"}]}', "half a character"),
    "latin-1": ('{"é": 1}'.encode("latin-1"), "not UTF-8 text"),
}


@pytest.mark.parametrize("name", NOT_NOTEBOOKS)
def test_what_is_no_notebook_is_named_and_never_overwritten(course, capsys, name):
    content, what = NOT_NOTEBOOKS[name]
    path = course / f"notebooks/{FIRST}.ipynb"
    path.write_bytes(content)
    (problem,) = lines(course)
    assert problem.startswith(f"notebooks/{FIRST}.ipynb: ") and what in problem
    assert f"`python -m tools.notebooks update --force {FIRST}` makes it anew" in problem
    for command in (["check", "--fix"], ["update"], ["adopt"], ["outputs", FIRST]):
        assert notebooks.main(command, course) == 1
        assert path.read_bytes() == content
    assert notebooks.main(["update", "--force", FIRST], course) == 0
    assert [line for line in lines(course) if "tagged for a stored output" not in line] == []


def test_a_folder_in_place_of_a_file_is_named(course):
    for suffix in ("py", "ipynb"):
        path = course / f"notebooks/{FIRST}.{suffix}"
        path.unlink()
        path.mkdir()
    assert sum("a folder, not a file" in line for line in lines(course)) == 2
    assert notebooks.main(["check", "--fix"], course) == 1


def test_an_empty_notebook_is_made_anew(course):
    (course / f"notebooks/{FIRST}.ipynb").write_bytes(b" \n")
    assert lines(course) == [f"notebooks/{FIRST}.ipynb: empty; `python -m tools.notebooks check --fix` mends it"]
    notebooks.fix(course)
    assert len(load(course)["cells"]) == 5


def test_a_py_without_ipynb_and_the_other_way_round(course):
    text = (course / f"notebooks/{SECOND}.py").read_text()
    (course / f"notebooks/{FIRST}.ipynb").unlink()
    (course / f"notebooks/{SECOND}.py").unlink()
    assert lines(course) == [
        f"notebooks/{FIRST}.ipynb: missing; `python -m tools.notebooks check --fix` mends it",
        f"notebooks/{SECOND}.py: missing; `python -m tools.notebooks adopt {SECOND}` makes it",
    ]
    assert notebooks.update(course, [FIRST]) == []
    assert notebooks.adopt(course, [SECOND]) == []
    assert (course / f"notebooks/{SECOND}.py").read_text() == text
    assert [line for line in lines(course) if "tagged for a stored output" not in line] == []


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b"no cells, no comment\n"])
def test_a_py_that_is_none_is_named_and_the_notebook_stays(course, content):
    path = course / f"notebooks/{FIRST}.py"
    notebook = load(course)
    path.write_bytes(content)
    assert lines(course)[0].startswith(f"notebooks/{FIRST}.py: ")
    assert notebooks.main(["check", "--fix"], course) == 1
    assert [cell["source"] for cell in load(course)["cells"]] == [cell["source"] for cell in notebook["cells"]]
    if content.startswith(b"\xff"):
        assert notebooks.main(["adopt"], course) == 1 and path.read_bytes() == content


def test_a_notebook_with_another_kind_of_name_is_pointed_out(course):
    (course / "notebooks/Untitled.ipynb").write_text("{}")
    assert lines(course) == [
        "notebooks/Untitled.ipynb: not named like a lesson; rename it to NN_name.ipynb (small letters), or move it away"
    ]


def test_all_problems_are_reported_together(course):
    data = load(course)
    widgets(data), executed(data), duplicate_ids(data)
    save(course, data)
    other = load(course, SECOND)
    no_preset(other)
    save(course, other, SECOND)
    assert len(lines(course)) == 5


# Text that differs


def edit_ipynb(course, text="An edit in Jupyter."):
    data = load(course)
    data["cells"][2]["source"] = [text]
    save(course, data)


def edit_py(course):
    path = course / f"notebooks/{FIRST}.py"
    path.write_text(path.read_text().replace("Two lines of prose", "Three lines of prose"))


def test_an_edited_notebook_is_never_overwritten_unasked(course, capsys):
    (course / "course_utils/setup.py").write_text("def prepare(extras, *, install):\n    return 'ready'\n")
    edit_ipynb(course)
    before = snapshot(course)
    (line,) = lines(course)
    assert re.match(
        rf"notebooks/{FIRST}.ipynb: cell 3 \(\w+\): edited: it differs from the .py here; `.* adopt {FIRST}`", line
    )
    for command in (["check", "--fix"], ["update"], ["update", FIRST], ["outputs", FIRST]):
        assert notebooks.main(command, course) == 1
        assert "edited: it differs" in capsys.readouterr().err
    assert snapshot(course) == before


def test_adopt_takes_the_edit_into_the_py_and_nothing_else(course):
    before = (course / f"notebooks/{FIRST}.py").read_text()
    edit_ipynb(course)
    assert notebooks.main(["adopt", f"notebooks/{FIRST}.ipynb"], course) == 0
    after = (course / f"notebooks/{FIRST}.py").read_text()
    prose = "# Two lines of prose,\n# one with a [link](https://example.org).\n"
    assert after == before.replace(prose, "# An edit in Jupyter.\n")
    assert lines(course) == []


def test_update_force_discards_the_edit(course):
    good = load(course)
    edit_ipynb(course)
    assert notebooks.main(["update", "--force", FIRST], course) == 0
    assert load(course) == good


def test_fix_mends_the_rest_of_an_edited_notebook_and_still_knows_that_it_was_edited(course):
    data = load(course)
    widgets(data), wrong_badge(data), setup_edited(data), stored_output(data)
    data["cells"][2]["source"] = ["An edit."]
    save(course, data)
    assert notebooks.main(["check", "--fix"], course) == 1
    (line,) = lines(course)
    assert "edited: it differs from the .py here" in line
    assert load(course)["cells"][2]["source"] == ["An edit."]
    assert notebooks.main(["adopt"], course) == 0
    assert lines(course) == []


def test_an_edited_py_is_followed_and_ids_stay(course):
    ids = [cell["id"] for cell in load(course)["cells"]]
    edit_py(course)
    (line,) = lines(course)
    assert re.search(rf"cell 3 \(\w+\): older than the .py, which was edited here; `.* update {FIRST}`", line)
    assert notebooks.main(["adopt"], course) == 1, "adopt would have lost the .py's edit"
    assert notebooks.main(["update"], course) == 0
    data = load(course)
    assert "Three lines" in data["cells"][2]["source"][0]
    assert [cell["id"] for cell in data["cells"]] == ids
    assert data["cells"][3]["outputs"], "an unchanged cell keeps its stored output"
    assert lines(course) == []


def test_when_both_were_edited_neither_is_overwritten(course):
    edit_py(course), edit_ipynb(course)
    before = snapshot(course)
    (line,) = lines(course)
    assert "both may have been edited; merge by hand" in line
    for command in ("update", "adopt"):
        assert notebooks.main([command], course) == 1
    assert notebooks.main(["check", "--fix"], course) == 1
    assert snapshot(course) == before
    assert notebooks.main(["adopt", "--force"], course) == 0
    assert "An edit in Jupyter." in (course / f"notebooks/{FIRST}.py").read_text()


def test_a_notebook_from_elsewhere_without_a_digest_counts_as_edited(course):
    edit_ipynb(course)
    data = load(course)
    del data["metadata"]["course"]
    save(course, data)
    assert notebooks.main(["update"], course) == 1
    assert load(course)["cells"][2]["source"] == ["An edit in Jupyter."]


def test_adopt_refuses_text_that_the_py_cannot_hold(course, capsys):
    before = (course / f"notebooks/{FIRST}.py").read_text()
    data = load(course)
    code_cell(data)["source"] = ["# %% no cell\n", "x = 1"]
    save(course, data)
    assert notebooks.main(["adopt"], course) == 1
    assert "cannot hold" in capsys.readouterr().err
    assert (course / f"notebooks/{FIRST}.py").read_text() == before


def test_cells_that_are_added_moved_or_removed_keep_the_other_ids(course):
    path = course / f"notebooks/{FIRST}.py"
    old = {"".join(cell["source"]): cell["id"] for cell in load(course)["cells"]}
    path.write_text(path.read_text().replace('# %% tags=["nbval', '# %%\ny = 2\n\n# %% tags=["nbval'))
    assert notebooks.update(course) == []
    new = {"".join(cell["source"]): cell["id"] for cell in load(course)["cells"]}
    assert {source: new[source] for source in old} == old
    assert set(new) - set(old) == {"y = 2"}


def test_an_output_goes_when_its_cells_source_changes(course):
    path = course / f"notebooks/{FIRST}.py"
    path.write_text(path.read_text().replace("same everywhere", "another text"))
    assert notebooks.update(course) == []
    assert load(course)["cells"][3]["outputs"] == []
    (line,) = lines(course)
    assert "tagged for a stored output, but has none; `python -m tools.notebooks outputs` runs" in line


def test_attachments_stay(course):
    data = load(course)
    data["cells"][2]["attachments"] = {"a.png": {"image/png": "AAAA"}}
    save(course, data)
    notebooks.fix(course), edit_py(course), notebooks.update(course)
    assert load(course)["cells"][2]["attachments"] == {"a.png": {"image/png": "AAAA"}}


# Stored outputs


@pytest.mark.usefixtures("one_kernel")
def test_outputs_runs_the_lesson_and_stores_the_tagged_cells_only(course):
    path = course / f"notebooks/{FIRST}.py"
    text = path.read_text().replace("# !nvidia-smi\n", "print('not stored')\n")
    path.write_text(re.sub(r"(?s)^_setup\(\)$", "", text, flags=re.M))
    notebooks.fix(course)
    data = load(course)
    data["cells"][3]["outputs"] = []
    save(course, data)
    (course / "course_utils/setup.py").write_text("def prepare(extras, *, install):\n    return 'ready'\n")
    assert notebooks.main(["outputs", FIRST], course) == 0
    setup, _, stored, plain = load(course)["cells"][1:]
    assert stored["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["same everywhere\n"]}]
    assert stored["execution_count"] == 2
    assert setup["outputs"] == [] and plain["outputs"] == [] and plain["execution_count"] is None
    before = snapshot(course)
    assert notebooks.main(["outputs", FIRST], course) == 0
    assert {n: c for n, (c, _) in snapshot(course).items() if "__pycache__" not in n} == {
        n: c for n, (c, _) in before.items() if "__pycache__" not in n
    }


@pytest.mark.usefixtures("one_kernel")
def test_outputs_says_which_cell_failed_and_stores_nothing(course, capsys):
    before = load(course)
    (course / "course_utils/setup.py").write_text(
        "def prepare(extras, *, install):\n    raise ValueError('no\\nway')\n"
    )
    assert notebooks.main(["outputs", FIRST], course) == 1
    assert "running it failed: ValueError: no\\nway" in capsys.readouterr().err
    assert load(course) == before


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"execution_count": None}, "a stored output without its execution count; `python -m tools.notebooks outputs`"),
        ({"outputs": []}, "tagged for a stored output, but has none"),
        (
            {"outputs": [{"output_type": "stream", "name": "stdout", "text": "x" * 30_000}]},
            "a stored output of 30,0.. characters; print less",
        ),
    ],
)
def test_a_stored_output_that_cannot_be_compared_is_named(course, change, what):
    data = load(course)
    data["cells"][3] |= change
    save(course, data)
    notebooks.fix(course)
    (line,) = lines(course)
    assert re.search(what, line)


# The .py


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("accelerator: GPU", "accelerator: TPU", "its header is not the course's"),
        (
            "#       format_version: '1.3'",
            "#       format_version: '1.3'\n#       jupytext_version: 1.19.5",
            "its header",
        ),
        (f"notebooks/{FIRST}.ipynb", f"notebooks/{SECOND}.ipynb", "cell 1: badges or setup cell are not the generated"),
        ('"octo/course", "main"', '"evil/course", "main"', "cell 2: badges or setup cell are not the generated"),
    ],
)
def test_the_generated_parts_of_the_py_are_checked_and_mended(course, old, new, what):
    path = course / f"notebooks/{FIRST}.py"
    good = path.read_text()
    assert old in good
    path.write_text(good.replace(old, new))
    assert any(line.startswith(f"notebooks/{FIRST}.py: ") and what in line for line in lines(course))
    assert notebooks.main(["check", "--fix"], course) == 0
    assert path.read_text() == good


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("# # 01 · First steps", "# # First steps", "no title; start it with .* first line is `# 01 · Title`"),
        ("# > What is", "# What is", "no question; add the line `> "),
    ],
)
def test_a_lesson_states_its_number_title_and_question(course, old, new, what):
    path = course / f"notebooks/{FIRST}.py"
    path.write_text(path.read_text().replace(old, new))
    notebooks.update(course)
    (line,) = lines(course)
    assert re.search(rf"^notebooks/{FIRST}.py: cell 1: {what}", line)


def test_a_link_to_the_next_lesson_may_stand_in_the_last_cell(course):
    path = course / f"notebooks/{FIRST}.py"
    link = Publication("old/place").colab(f"notebooks/{SECOND}.ipynb").markdown()
    path.write_text(path.read_text() + f"\n# %% [markdown]\n# Next: {link}\n#\n# {link}\n")
    notebooks.fix(course)
    assert lines(course) == []
    assert "".join(load(course)["cells"][-1]["source"]).count(f"{COLAB}/notebooks/{SECOND}.ipynb") == 2


@pytest.mark.parametrize(
    ("link", "what"),
    [
        (f"{COLAB}/notebooks/09_not_there.ipynb", "notebooks/09_not_there.ipynb, which is not there"),
        (f"{COLAB}/notebooks/01_fir", "a launch link that names no notebook"),
    ],
)
def test_a_launch_link_that_leads_nowhere_is_named(course, link, what):
    path = course / f"notebooks/{FIRST}.py"
    path.write_text(path.read_text() + f"\n# %% [markdown]\n# Next: [here]({link})\n")
    notebooks.fix(course)
    (line,) = lines(course)
    assert line.startswith(f"notebooks/{FIRST}.py: cell 6: ") and what in line


def test_a_badge_that_a_line_break_cut_in_two_is_named_and_a_whole_one_is_put_in(course):
    path = course / f"notebooks/{FIRST}.py"
    text = path.read_text()
    path.write_text(text.replace(f"{COLAB}/notebooks", f"{COLAB}/\n# notebooks"))
    notebooks.fix(course)
    assert Publication("octo/course").badge_row(f"notebooks/{FIRST}.ipynb") in path.read_text()
    (line,) = lines(course)
    assert line.startswith(f"notebooks/{FIRST}.py: cell 1: a launch link that names no notebook")


def test_windows_line_ends_are_no_difference(course):
    for suffix in ("py", "ipynb"):
        path = course / f"notebooks/{FIRST}.{suffix}"
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    before = snapshot(course)
    assert notebooks.main(["check", "--fix"], course) == 0
    assert snapshot(course) == before


def test_an_unknown_lesson_is_named(course, capsys):
    assert notebooks.main(["update", "03_third"], course) == 1
    assert "03_third: no such lesson in notebooks/" in capsys.readouterr().err


def test_an_interrupted_write_leaves_the_old_file(course, monkeypatch):
    before = snapshot(course)
    edit_py(course)
    changed = snapshot(course)
    monkeypatch.setattr("tools.pairs.Path.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        notebooks.update(course)
    assert snapshot(course) == changed
    assert set(before) == set(changed)


# Any content at all

CELL = st.fixed_dictionaries(
    {"cell_type": st.sampled_from(["code", "markdown", "raw"]), "source": st.text(max_size=40)},
    optional={
        "id": st.one_of(st.text(max_size=5), st.integers(), st.none()),
        "metadata": st.dictionaries(st.sampled_from(["tags", "id", "x"]), st.one_of(st.text(), st.lists(st.text()))),
        "outputs": st.lists(st.just({"output_type": "stream", "name": "stdout", "text": "x"}), max_size=2),
        "execution_count": st.one_of(st.none(), st.integers(0, 9)),
    },
)


@settings(max_examples=25, deadline=None)
@example(cells=[{"cell_type": "markdown", "source": ""}], metadata={})
@given(cells=st.lists(CELL, max_size=5), metadata=st.dictionaries(st.text(max_size=8), st.text(max_size=8)))
def test_any_notebook_is_checked_without_an_exception_and_fixing_keeps_its_text(tmp_path_factory, cells, metadata):
    course = make_course(tmp_path_factory.mktemp("any") / "course")
    save(course, {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells})
    written = [cell["source"] for cell in cells if "setup" not in cell.get("metadata", {}).get("tags", [])]
    found = lines(course)
    assert found and all("\n" not in line for line in found)
    remaining = [str(problem) for problem in notebooks.fix(course)]
    kept = "\0".join("".join(cell["source"]) for cell in load(course)["cells"])
    assert all(source.strip() in kept for source in written)
    again = snapshot(course)
    assert [str(problem) for problem in notebooks.fix(course)] == remaining
    assert snapshot(course) == again


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text()),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(
                    ["cells", "nbformat", "metadata", "cell_type", "source", "outputs", "output_type", "data", "text"]
                ),
                x,
            )
        ),
    )
)
def test_any_json_is_parsed_or_named(data):
    from tools.pairs import parse

    if isinstance(data, dict):
        data["nbformat"] = 4
    notebook, fault = parse(json.dumps(data))
    assert (notebook is None) == bool(fault)
