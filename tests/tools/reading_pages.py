"""Reading a page as a browser's parser does, and refusing what a self-contained one must not have."""

from html.parser import HTMLParser

VOID = {"meta", "input", "br", "hr", "img"}
FETCHING = {"script", "link", "iframe", "img", "image", "object", "embed", "base"}


class Page(HTMLParser):
    """`elements` are (tag, attributes, text inside); `text` is all that is shown."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(source)
        self.close()
        assert not self._open, f"left open: {[tag for tag, *_ in self._open]}"

    def handle_starttag(self, tag, attributes):
        element = (tag, dict(attributes), [])
        assert len(element[1]) == len(attributes), f"an attribute twice in {tag}"
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))

    def handle_endtag(self, tag):
        opened = self._open.pop()[0]
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, text):
        for *_, inside in self._open:
            inside.append(text)

    def find(self, tag: str, kind: str | None = None) -> list[str]:
        """The texts of elements, of a class if one is given."""
        return [
            "".join(inside) for name, at, inside in self.elements if name == tag and kind in (None, at.get("class"))
        ]


def assert_self_contained(source: str) -> Page:
    page = Page(source)
    for tag, attributes, _ in page.elements:
        assert tag not in FETCHING, tag
        for name, value in attributes.items():
            assert not name.startswith("on"), f"{name} of {tag} is a script"
            if name.split(":")[-1] in ("src", "href", "data", "action", "poster", "srcset"):
                assert (value or "").startswith("#"), f"{tag} fetches {value}"
    [style] = page.find("style")[:1]
    assert "@import" not in style
    assert "url(" not in style
    return page
