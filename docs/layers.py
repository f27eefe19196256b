"""Draw the layers of both packages from ``tests/test_architecture.py`` (``python -m docs.layers``)."""

from pathlib import Path

from tests.test_architecture import LAYERS

PICTURE = Path(__file__).parent / "development/layers.svg"
WIDTH, ROW, HEAD, LEFT = 760, 30, 64, 20
STYLE = """text { font: 13px sans-serif; fill: #1f2937 } .name { font-weight: 600; font-size: 15px }
.small { font-size: 11px; fill: #6b7280 } rect { rx: 5 } .folder { fill: #dbeafe; stroke: #93c5fd }
.file { fill: #f3f4f6; stroke: #d1d5db } .arrow { stroke: #6b7280; fill: none }"""


def picture() -> str:
    """Return an SVG image with a column for each package, the lowest layer at the bottom."""
    height = HEAD + ROW * max(len(layers) for layers in LAYERS.values()) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    column = WIDTH // len(LAYERS)
    for number, (package, layers) in enumerate(LAYERS.items()):
        left = LEFT + number * column
        parts.append(f'<text class="name" x="{left}" y="24">{package}</text>')
        parts.append(f'<text class="small" x="{left}" y="42">each row imports only rows below it</text>')
        for level, rooms in enumerate(layers):
            top = height - 12 - ROW * (level + 1)
            wide = (column - 2 * LEFT) / len(rooms)
            for place, room in enumerate(sorted(rooms)):
                kind = "folder" if (Path(__file__).parents[1] / package / room).is_dir() else "file"
                x = left + place * wide
                parts.append(
                    f'<rect class="{kind}" x="{x:g}" y="{top}" width="{wide - 4:g}" height="{ROW - 5}"/>'
                )
                label = f"{room}/" if kind == "folder" else room
                parts.append(
                    f'<text x="{x + wide / 2 - 2:g}" y="{top + 17}" text-anchor="middle">{label}</text>'
                )
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(picture())
