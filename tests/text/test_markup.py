"""Text of HTML, however broken, in time proportional to its length."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from offload_rt.text.documents import html_text, markup


def test_html_as_text() -> None:
    html = """<!DOCTYPE html><html><head><title>Moby&nbsp;Dick</title><style>p { color: red }</style>
    <script>if (1 < 2) alert("<p>no</p>");</script></head><body><h1>Loomings</h1>
    <p>Call  me\n <em>Ish</em>mael.<br>Some&shy;times &amp; <!-- no --> often</p><ul><li>one<li>two</ul>
    <pre>a   b
      c</pre><table><tr><td>1<td>2<tr><td></td><td>4</td></table>
    <template><p>no<template>no</template>no</template><p>end"""
    assert html_text(html) == (
        "Moby Dick\n\nLoomings\n\nCall me Ishmael.\nSometimes & often\n\none\ntwo\n\na   b\n      c\n\n"
        "1\t2\n\t4\n\nend"
    )


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("", ""),
        ("</script></pre>fine < fine & fine", "fine < fine & fine"),
        # Declarations that are none.
        ("<![foo]>a", "a"),
        ("<!ELEMENT br [>a<!>b", "ab"),
        ("<!DOCTYPE html [<!ENTITY hero '>'>]>a", "a"),
        ("<!DOCTYPE html [ a", "<!DOCTYPE html [ a"),
        ("<?php a ?>b<?xml", "b<?xml"),
        ("a</>b</ p>c</p q=''>d", "abc\n\nd"),
        # What has no end hides nothing.
        ("a<!-- b<p>c", "a<!-- b\n\nc"),
        ("<script>a<p>b", "a\n\nb"),
        ("<style>a</stylex>b", "ab"),
        ("<title>a<p>b", "a\n\nb"),
        ("<template>a<p>b", "a\n\nb"),
        ("<![CDATA[a", "<![CDATA[a"),
        ("a <b", "a <b"),
        ("a<b c", "a<b c"),
        ("a</b", "a</b"),
        ('<a b="c>d <i e="f">g</i>', "d g"),
        ("<a b='>' c", "' c"),
        # What has one does.
        ("a<!-->b<!--->c<!-- d --!>e<!-- > -->f", "abcef"),
        ("<![CDATA[a<b&amp;]]>c", "a<b&amp;c"),
        ("<SCRIPT>a</x></script\n>b<style/>c", "bc"),
        ("<title>A <b> &amp; c</title>", "A <b> & c"),
        ("<textarea><p></textarea>", "<p>"),
        ("<a title='>' b=\"c\"d>e</a>", "e"),
        ("<p title=x/>a", "a"),
        ("<noscript>a</noscript>", "a"),
        # Line breaks and cells.
        ("a<br/>b<br><br>c<br><br><br>d", "a\nb\n\nc\n\nd"),
        ("<pre>\na\n\n\n\nb</pre>c", "a\n\n\n\nb\n\nc"),
        ("<pre>a \r\n<b>\tb</b> c</pre>", "a \n\tb c"),
        ("<table><tr><td>a<td></td><td>b", "a\t\tb"),
        ("a<template> b</template>c", "ac"),
        # References.
        ("&lt;p&gt &#x41;&#66;&#0000000067; &nosuch; &", "<p> ABC &nosuch; &"),
        (f"&#{'9' * 5000};&#x{'9' * 5000};&#xd800;", "\ufffd\ufffd\ufffd"),
    ],
)
def test_html_that_is_odd_or_broken(html: str, text: str) -> None:
    assert html_text(html) == text


REPEATED = [
    *("<!--", "<!", "<![", "<![CDATA[", "<!DOCTYPE [", "<?", "</", "</a", "<a", "<a ", "<a b='", '<a b="'),
    *("<a b=c ", "<a b='>' ", "<", "&", "&#", "&a", "&amp", "<script>", "<style>", "<title>", "<textarea>"),
    *(
        "<script></scrip",
        "<template>",
        "<template></style>",
        "<div>",
        "</div>",
        "<pre> ",
        "<td>",
        "<td><template>",
    ),
    *(
        "<pre> <template>",
        "<table>",
        "<br>",
        " ",
        "\n",
        "\t ",
        "a ",
        "-",
        "--",
        "]",
        "]]",
        "'",
        '"',
        "<a/",
        "<a\n=",
    ),
]


def work(html: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The characters that searches look at and the functions that are called while HTML is read."""
    done = 0

    def search(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
        nonlocal done
        found = pattern.search(text, start)
        done += (found.end() if found else len(text)) - start
        return found

    def count(*event: Any) -> None:
        nonlocal done
        done += 1

    monkeypatch.setattr(markup, "search", search)
    profiler = sys.getprofile()
    sys.setprofile(count)
    try:
        html_text(html)
    finally:
        sys.setprofile(profiler)
    return done


@pytest.mark.parametrize("end", ["", ">"])
@pytest.mark.parametrize("unit", REPEATED)
def test_html_takes_time_proportional_to_its_length(
    unit: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = (work(unit * times + end, monkeypatch) for times in (250, 1000))
    assert long <= 4.5 * short
