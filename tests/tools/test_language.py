import pytest

from tools.language import (
    CHECKED,
    MAX_PARAGRAPH_WORDS,
    MAX_README_LINES,
    PROSE,
    WordList,
    long_paragraphs,
    long_readme,
    paragraphs,
    rejected_words,
    tracked_files,
)

WORDS = WordList.load()


def found(text):
    return [finding.text.partition(" -> ")[0] for finding in rejected_words("a.py", text, WORDS)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It tells the engine.", ["tells"]),
        ("Nobody heard it; Told twice.", ["nobody", "heard", "told"]),
        ("nobody's", ["nobody"]),
        ("num_told = len(self._untold)", ["told"]),
        ("def on_heard(self): ...", ["heard"]),
        ("NUM_SAID", ["said"]),
        ('class="to-tell"', ["tell"]),
        ("It is made anew, for ever.", ["anew", "for ever"]),
        ("so_many", ["so many"]),
        ("a thread of its\n# own", ["of its own"]),
        ("waits in\n     * vain", ["in vain"]),
        ("by what\nit gains", ["by what"]),
        ("It says by and\n    by what it is", ["says", "by and by"]),
        ("num_tokens_behind, in front\n    of it", ["behind", "in front of"]),
        ("behind a proxy", []),
    ],
)
def test_rejected_words_are_found_as_whole_words(text, expected):
    assert found(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "intelligence, retell, saying1, essay, hearty, judgement, amends, recommend",
        "so that many of its replicas own it by whatever is in use",
        "onTold",  # only an underscore or a hyphen ends a word inside a name
        "position = file.tell()",
    ],
)
def test_other_words_and_allowed_names_are_not_found(text):
    assert found(text) == []


def test_a_finding_has_path_line_and_advice():
    (finding,) = rejected_words("specdec/x.py", "a\n# so\n# many\n", WORDS)
    assert str(finding) == f"specdec/x.py:2: so many -> {WORDS.instead['so many']}"


def test_every_form_has_advice_that_is_not_itself_rejected():
    assert all(found(form) == [form] for form in WORDS.instead)
    assert [advice for advice in WORDS.instead.values() if found(advice)] == []


MARKDOWN = """# A heading

One paragraph
of two lines.

- an item
  that goes on
- another item
1. a numbered item

| a | table |
|---|---|
| with | words |
After the table.

```bash
some code
```

~~~
- more code
~~~
"""


def test_paragraphs_and_list_items_are_counted_and_code_and_tables_are_not():
    assert list(paragraphs(MARKDOWN)) == [
        (3, "One paragraph of two lines."),
        (6, "an item that goes on"),
        (8, "another item"),
        (9, "a numbered item"),
        (14, "After the table."),
    ]


def test_a_long_paragraph_is_found_and_a_link_counts_as_its_text():
    fits = "word " * (MAX_PARAGRAPH_WORDS - 1) + "[link](a b c)"
    assert list(long_paragraphs("a.md", fits)) == []
    (finding,) = long_paragraphs("a.md", f"# Heading\n\n{fits} more")
    assert str(finding).startswith(f"a.md:3: {MAX_PARAGRAPH_WORDS + 1} words -> ")


def test_only_a_readme_at_the_top_has_a_limit_of_lines():
    allowed = "a\n" * MAX_README_LINES
    assert list(long_readme("README.md", allowed)) == []
    assert list(long_readme("deploy/README.md", allowed + "a\n")) == []
    (finding,) = long_readme("README.md", allowed + "a\n")
    assert finding.line == MAX_README_LINES + 1


def test_files_of_others_are_skipped_and_ours_are_checked():
    files = tracked_files(CHECKED, WORDS.skipped)
    skipped = ("third_party/", "package-lock.json", "tests/k8s/schemas/", "constraints.txt")
    assert [path for path in files if any(name in path for name in skipped)] == []
    ours = {
        "README.md",
        "Makefile",
        "setup.py",
        "deploy/docker/Dockerfile.cpu",
        "tools/language.py",
    }
    assert ours <= {*files}
    assert {"README.md", "docs/index.md", "k8s/specdec/README.md"} <= {*tracked_files(PROSE, ())}
