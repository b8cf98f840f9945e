"""tools.publish: what is stated in one place reaches every link, and nothing unsafe can be stated."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_course import FIRST, SECOND, load, make_course, save, snapshot

from tools import lessons, notebooks, publish, setup_cell
from tools.publication import PLACEHOLDER, Publication, read_publication

README = f"# The course\n\nText above.\n\n{publish.BEGIN}\nold\n{publish.END}\n\nText below.\n"
PATH = f"notebooks/{FIRST}.ipynb"


@pytest.fixture
def course(tmp_path, monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    root = make_course(tmp_path / "course")
    (root / "README.md").write_text(README)
    assert publish.main([], root) == 0
    return root


def files(root):
    return {name: content.decode() for name, (content, _) in snapshot(root).items()}


def test_a_second_run_changes_no_byte_and_check_agrees(course):
    before = snapshot(course)
    for arguments in ([], ["--check"], ["octo/course"], ["octo/course", "--ref", "main"], ["--check", "octo/course"]):
        assert publish.main(arguments, course) == 0
    assert snapshot(course) == before


def test_one_command_moves_every_link(course, capsys):
    assert publish.main(["Ada-L/gpu.course", "--ref", "v1.2"], course) == 0
    for name, text in files(course).items():
        assert "octo/course" not in text, name
    after = files(course)
    link = f"https://colab.research.google.com/github/Ada-L/gpu.course/blob/v1.2/{PATH}"
    for name in (f"notebooks/{FIRST}.py", PATH, "README.md", "colab_badges.md"):
        assert f"({link})" in after[name], name
    for name in (f"notebooks/{FIRST}.py", f"notebooks/{SECOND}.py"):
        assert '= "Ada-L/gpu.course", "v1.2", "0.1.0", ""' in after[name]
    assert read_publication(course) == Publication("Ada-L/gpu.course", "v1.2")
    assert notebooks.check_all(course) == []
    assert "Links lead to Ada-L/gpu.course at v1.2." in capsys.readouterr().out
    before = snapshot(course)
    assert publish.main([], course) == 0
    assert snapshot(course) == before


def test_pyproject_keeps_every_other_byte(course):
    before = (course / "pyproject.toml").read_bytes()
    publish.main(["Ada-L/other", "--ref", "dev"], course)
    changed = before.replace(b'"octo/course"', b'"Ada-L/other"').replace(b'ref = "main"', b'ref = "dev"')
    assert (course / "pyproject.toml").read_bytes() == changed != before


@pytest.mark.parametrize(
    "text",
    [
        "[tool.course]\nref = 'main'\nrepository = 'a/b'",
        '[tool.course]\r\nrepository="a/b"\r\nref="main"\r\n[tool.ruff]\r\nline-length = 120\r\n',
        '[x]\nref = "no"\n[tool.course] # here\nrepository   =   "a/b" # this\nref = "main"\n\n[[y]]\nref = "no"\n',
    ],
)
def test_pyproject_may_be_written_in_many_ways(text):
    written = publish.with_publication(text, Publication("c/d", "v2"))
    wanted = tomllib.loads(text)
    wanted["tool"]["course"] = {"repository": "c/d", "ref": "v2"}
    assert tomllib.loads(written) == wanted
    assert written.count("\r") == text.count("\r")
    assert publish.with_publication(written, Publication("c/d", "v2")) == written


@pytest.mark.parametrize("text", ["", "[tool.course]\nref = 1\n", 'tool.course = {repository = "a/b", ref = "main"}\n'])
def test_a_pyproject_that_states_it_otherwise_gets_a_sentence(course, capsys, text):
    (course / "pyproject.toml").write_text(text)
    before = snapshot(course)
    assert publish.main(["c/d"], course) == 1
    assert "pyproject.toml: " in capsys.readouterr().err
    assert snapshot(course) == before


def test_check_names_what_is_out_of_date_and_changes_nothing(course, capsys):
    (course / "README.md").write_text(README)
    (course / "colab_badges.md").unlink()
    data = load(course)
    data["cells"][0]["source"] = [line.replace("octo", "fork") for line in data["cells"][0]["source"]]
    save(course, data)
    before = snapshot(course)
    assert publish.main(["--check"], course) == 1
    said = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if "out of date" in line]
    assert sorted(said) == ["README.md", "colab_badges.md", PATH]
    assert snapshot(course) == before
    assert publish.main([], course) == 0
    assert publish.main(["--check"], course) == 0


def test_check_tells_a_fork_that_it_still_carries_the_originals_links(course, monkeypatch, capsys):
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/fork")
    assert publish.main(["--check"], course) == 0, "a bare call must not look at the environment"
    assert publish.main(["--check", "--detect"], course) == 1
    assert "pyproject.toml: out of date" in capsys.readouterr().out
    assert publish.main(["--detect"], course) == 0
    assert read_publication(course) == Publication("someone/fork", "main")


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("https://github.com/ada/course.git", "ada/course"),
        ("https://github.com/ada/course", "ada/course"),
        ("https://token@github.com/ada/course.git", "ada/course"),
        ("git@github.com:ada/course.git", "ada/course"),
        ("ssh://git@github.com/ada/course.x", "ada/course.x"),
        ("https://gitlab.com/ada/course", None),
        ("https://github.com.evil.org/ada/course", None),
        ("/srv/git/course.git", None),
    ],
)
def test_the_git_remote_is_the_second_place_to_look(course, url, found, capsys):
    subprocess.run(["git", "init", "-q", course], check=True)
    subprocess.run(["git", "-C", course, "remote", "add", "origin", url], check=True)
    assert publish.remote(course) == found
    assert publish.main(["--detect", "--check"], course) == 1
    if found is None:
        assert "name OWNER/REPO" in capsys.readouterr().err


def test_a_placeholder_says_that_it_is_not_published_and_names_the_command(course, capsys):
    assert publish.main([PLACEHOLDER], course) == 0
    assert "Not published yet" in capsys.readouterr().out
    assert "**Not published yet:**" in (course / "colab_badges.md").read_text()
    assert notebooks.check_all(course) == []
    subprocess.run(["git", "init", "-q", course], check=True)
    subprocess.run(["git", "-C", course, "remote", "add", "origin", "git@github.com:ada/course.git"], check=True)
    assert publish.main([], course) == 0
    assert "`python -m tools.publish ada/course` sets the repository" in capsys.readouterr().out
    assert read_publication(course).repository == PLACEHOLDER


def test_readme_keeps_its_text_and_lists_each_lesson(course):
    text = (course / "README.md").read_text()
    assert text.startswith("# The course\n\nText above.\n\n<!-- lessons:begin -->\n| # |")
    assert text.endswith("<!-- lessons:end -->\n\nText below.\n")
    row = Publication("octo/course").badge_row(PATH)
    assert f"| 01 | [First steps]({PATH}) | What is 01_first? | {row} |\n" in text
    assert text.index("[First steps]") < text.index("[Second steps]")


@pytest.mark.parametrize("text", ["# No markers\n", publish.BEGIN, f"{publish.END}\n{publish.BEGIN}", README + README])
def test_a_readme_without_its_markers_is_named_and_left_alone(course, capsys, text):
    (course / "README.md").write_text(text)
    assert publish.main([], course) == 1
    assert "README.md: no place for the lesson table; put `<!-- lessons:begin -->`" in capsys.readouterr().err
    assert (course / "README.md").read_text() == text


def test_an_edited_notebook_keeps_its_text_and_is_named(course, capsys):
    data = load(course)
    data["cells"][2]["source"] = ["An edit."]
    save(course, data)
    assert publish.main(["Ada/other"], course) == 1
    assert f"{PATH}: cell 3" in capsys.readouterr().err
    text = (course / PATH).read_text()
    assert "An edit." in text and "Ada/other" in text and "octo/course" not in text


def test_a_notebook_that_cannot_be_read_is_named_and_left_alone(course, capsys):
    (course / PATH).write_text("<<<<<<< HEAD\n")
    assert publish.main(["Ada/other"], course) == 1
    assert f"{PATH}: not JSON" in capsys.readouterr().err
    assert (course / PATH).read_text() == "<<<<<<< HEAD\n"


def test_the_badge_page_has_every_link_as_markdown_and_as_html(course):
    text = (course / "colab_badges.md").read_text()
    assert text.count("```markdown\n") == text.count("```html\n") == 2
    assert re.findall("^## (.*)$", text, re.M) == ["01 · First steps", "02 · Second steps"]
    for badge in Publication("octo/course").badges(PATH):
        assert text.count(badge.markdown()) == 2  # shown once, to copy once
        assert f'<a href="{badge.url}"><img src="{badge.image}" alt="{badge.name}"></a>\n' in text
    assert "mybinder.org" in text and "CPU" in text and "nbviewer.org" in text


def test_titles_and_questions_bring_no_markup_with_them():
    lesson = lessons.describe("01_x", "# %% [markdown]\n# # 01 · A | <b>[x]\n#\n# > Is a|b <script>?\n")
    table = publish.lesson_table([lesson], Publication())
    assert "<" not in table and r"A \| &lt;b&gt;\[x\]" in table and r"Is a\|b &lt;script&gt;?" in table


def test_the_links_have_the_documented_form():
    publication = Publication("octo/course", "feature/x")
    colab, kaggle, binder, nbviewer = (badge.url for badge in publication.badges(PATH))
    assert colab == f"https://colab.research.google.com/github/octo/course/blob/feature/x/{PATH}"
    source = f"https://github.com/octo/course/blob/feature/x/{PATH}"
    assert kaggle == f"https://kaggle.com/kernels/welcome?src={source}"
    assert binder == f"https://mybinder.org/v2/gh/octo/course/feature%2Fx?labpath={PATH}"
    assert nbviewer == f"https://nbviewer.org/github/octo/course/blob/feature%2Fx/{PATH}"


BAD_REPOSITORIES = [
    *(
        "",
        "/",
        "a",
        "a/",
        "/b",
        "a/b/c",
        "a b/c",
        "a/b c",
        'a"/b',
        "a'/b",
        "a/b\n",
        "\na/b",
        "a/b\r",
        "a/b\0",
        "a/b`",
        "a/b$",
    ),
    *(
        "a/..",
        "../b",
        "a/.",
        "a/b..c",
        "-a/b",
        "a-/b",
        "a--b/c",
        "a__b/c",
        "_a/b",
        "your__account/other",
        "a/b.git",
        "a/-b",
    ),
    *(
        "а/b",
        "a/ｂ",
        "a/b\u200b",
        "a\u202eb/c",
        "https://github.com/a/b",
        "a/b@main",
        "a/b#x",
        "a/b?x",
        "a/b%2e",
        "a\\b",
    ),
    *("x" * 40 + "/b", "a/" + "x" * 101, "{a}/b", "a/@REF@"),
]
BAD_REFS = [
    *(
        "",
        " ",
        "a b",
        "a\nb",
        "main\n",
        "\tmain",
        'a"b',
        "a'b",
        "a`b",
        "a\\b",
        "a$b",
        "a;b",
        "a\0b",
        "a\x7fb",
        "-x",
        "--upload-pack=x",
    ),
    *(
        "..",
        "a..b",
        "a/../b",
        "/a",
        "a/",
        "a//b",
        "a.lock",
        "a.lock/b",
        ".a",
        "a/.b",
        "a.",
        "a./b",
        "@",
        "a@{1}",
        "a~1",
        "a^",
        "a:b",
    ),
    *("a?b", "a*b", "a[b", "mаin", "ｍain", "main\u200b", "a%2fb", "a#b", "a&b", "a+b", "x" * 201),
]


@pytest.mark.parametrize("repository", BAD_REPOSITORIES)
def test_what_is_no_repository_is_refused_before_anything_changes(course, capsys, repository):
    before = snapshot(course)
    assert publish.main(["--check", "--", repository] if repository else ["--detect"], course) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and ("OWNER/REPO" in said)
    with pytest.raises(ValueError, match="is no repository"):
        Publication(repository)
    assert snapshot(course) == before


@pytest.mark.parametrize("ref", BAD_REFS)
def test_what_is_no_safe_ref_is_refused_before_anything_changes(course, capsys, ref):
    before = snapshot(course)
    assert publish.main(["octo/course", f"--ref={ref}"], course) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "is no safe ref" in said
    assert snapshot(course) == before


@pytest.mark.parametrize(
    "repository", ["a/b", "Ada-L/gpu.course_2", "a1/.github", "octo_corp/x", "a/" + "x" * 100, PLACEHOLDER]
)
@pytest.mark.parametrize("ref", ["main", "v1.0", "feature/x", "release/2026.1", "a" * 40, "0", "_x", "x-y_z"])
def test_what_github_admits_is_admitted(repository, ref):
    publication = Publication(repository, ref)
    assert (publication.repository, publication.ref) == (repository, ref)


NAMES = st.one_of(
    st.text(max_size=30), st.from_regex(r"[\w.@{}/\\'\" %-]{0,20}"), st.from_regex(r"[a-z0-9._-]{1,9}/[a-z._-]{1,9}")
)


@given(repository=NAMES, ref=st.one_of(NAMES, st.just("main")))
@example(repository="a/b", ref="feature/x")
@example(repository='a/b", "x', ref="main")
@example(repository="a/b", ref="main)](https://evil.example")
def test_whatever_is_given_is_refused_or_safe_everywhere_it_goes(repository, ref):
    try:
        publication = Publication(repository, ref)
    except ValueError as error:
        assert "\n" not in str(error) and str(error).isascii()
        return
    assert re.fullmatch(r"[A-Za-z0-9._/-]+", repository + ref)
    hosts = ["colab.research.google.com", "kaggle.com", "mybinder.org", "nbviewer.org"]
    for badge, host in zip(publication.badges(PATH), hosts, strict=True):
        assert not re.search(r"[\s\"'<>()\\`]", badge.url)
        parts = urlsplit(badge.url)
        assert (parts.scheme, parts.netloc, parts.fragment) == ("https", host, "")
        leads_to = parse_qs(parts.query).get("src") or parse_qs(parts.query).get("labpath") or [unquote(parts.path)]
        assert leads_to[0].endswith(PATH)
        assert f"/{repository}/" in unquote(badge.url) and ref in unquote(badge.url)
        assert ".." not in parts.path.split("/")
        assert publish.with_table(README, f"{badge.markdown()}\n").count("\n") == README.count("\n")
    source = setup_cell.source(publication, "0.1.0")
    constants = ast.parse(source).body[0].value.elts
    assert [ast.literal_eval(constant) for constant in constants] == [repository, ref, "0.1.0", ""]
    assert source.count("\n") == setup_cell.source(Publication(), "0.1.0").count("\n")
    text = publish.with_publication('[tool.course]\nrepository = "x/y"\nref = "main"\n', publication)
    assert tomllib.loads(text) == {"tool": {"course": {"repository": repository, "ref": ref}}}


# This repository


def test_this_repository_states_where_it_is_published():
    publication = read_publication(notebooks.ROOT)
    assert "/" in publication.repository
    assert (
        publish.generate(notebooks.ROOT, publication)[0]["pyproject.toml"]
        == (notebooks.ROOT / "pyproject.toml").read_text()
    )


def test_lessons_are_found_in_order_with_title_and_question(course):
    (course / "notebooks/03_last.py").write_text(
        "# %% [markdown]\n# # 03 · The last\n#\n# Text\n#\n# > Why?\n# > Yes.\n\n# %%\n"
    )
    (course / "notebooks/notes.py").write_text("# %%\n")
    (course / "notebooks/04_broken.py").write_bytes(b"\xff")
    found = lessons.find_lessons(course)
    assert [(lesson.number, lesson.title, lesson.question) for lesson in found] == [
        ("01", "First steps", "What is 01_first?"),
        ("02", "Second steps", "What is 02_second?"),
        ("03", "The last", "Why?"),
    ]
    assert found[2].notebook == "notebooks/03_last.ipynb"
