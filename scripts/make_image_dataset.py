"""Make a dataset of questions about small pictures.

A picture is a square. It shows one to five shapes of one color, which are counted, or a digit, which is read; options
make the pictures harder. The rows are in rows.jsonl and val.jsonl, the pictures in images/. No two rows have the same
picture.

    python scripts/make_image_dataset.py --output_dir pictures --max_rows 20000
    python scripts/make_image_dataset.py --output_dir harder --side 96 --max_shapes 9 --digits 2

Rows depend only on the options; pixels of digits also depend on Pillow's release.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont

COLORS = {
    "red": (205, 40, 40),
    "green": (30, 140, 60),
    "blue": (40, 80, 210),
    "orange": (240, 140, 20),
    "purple": (130, 50, 160),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle")
BACKGROUNDS = ((255, 255, 255), (245, 240, 225), (225, 235, 245))


class Limits(NamedTuple):
    """What pictures show: at most so many shapes or a number of so many digits, on a square of `side` pixels."""

    side: int = 48
    max_shapes: int = 5
    digits: int = 1


DEFAULT = Limits()


class Picture(NamedTuple):
    """A picture with a question about it."""

    image: Image.Image
    channel: str
    question: str
    answer: str


def count_of(number: int, color: str, shape: str) -> str:
    """Return the answer to a question about a number of shapes."""
    if number == 1:
        return f"There is 1 {color} {shape}."
    return f"There are {number} {color} {shape}s."


def draw_shapes(rng: random.Random, limits: Limits) -> Picture:
    """Draw shapes of one kind and color, which do not touch each other."""
    image = _paper(rng, limits)
    draw = ImageDraw.Draw(image)
    number, color, shape = rng.randint(1, limits.max_shapes), rng.choice(list(COLORS)), rng.choice(SHAPES)
    columns = rows = 3  # each shape is in another cell of the picture
    width = limits.side / columns
    for cell in rng.sample(range(columns * rows), number):
        size = rng.uniform(0.55, 0.85) * width
        left = cell % columns * width + rng.uniform(1, width - size - 1)
        top = cell // columns * width + rng.uniform(1, width - size - 1)
        _draw_shape(draw, shape, (left, top, left + size, top + size), COLORS[color])
    return Picture(image, "count", f"How many {shape}s are there?", count_of(number, color, shape))


def draw_number(rng: random.Random, limits: Limits) -> Picture:
    """Draw a number without leading zeros."""
    image = _paper(rng, limits)
    smallest = 10 ** (limits.digits - 1)
    number, color = rng.randint(smallest, 10 * smallest - 1), rng.choice(list(COLORS))
    # A digit is about 0.6 times as wide as the size of its font.
    font = ImageFont.load_default(size=rng.uniform(0.75, 0.85) * limits.side * min(1, 1.6 / limits.digits))
    draw = ImageDraw.Draw(image)
    left, top, right, bottom = draw.textbbox((0, 0), str(number), font=font)
    place = (
        rng.uniform(2, limits.side - (right - left) - 2) - left,
        rng.uniform(2, limits.side - (bottom - top) - 2) - top,
    )
    draw.text(place, str(number), fill=COLORS[color], font=font)
    return Picture(image, "read", "Which number is in the picture?", f"The number is {number}.")


def make_pictures(num_pictures: int, seed: int, limits: Limits = DEFAULT) -> list[Picture]:
    """Return pictures of both kinds in turn, each different from all others."""
    rng = random.Random(seed)
    seen: set[tuple[tuple[int, int], bytes]] = set()
    pictures: list[Picture] = []
    while len(pictures) < num_pictures:
        draw = (draw_shapes, draw_number)[len(pictures) % 2]
        picture = draw(rng, limits)
        content = (picture.image.size, picture.image.tobytes())
        if content not in seen:
            seen.add(content)
            pictures.append(picture)
    return pictures


def write(directory: Path, pictures: list[Picture], num_val: int) -> None:
    """Write pictures and rows; the last `num_val` pictures are for validation."""
    (directory / "images").mkdir(parents=True, exist_ok=True)
    rows = [_row(directory, number, picture) for number, picture in enumerate(pictures)]
    num_train = len(rows) - num_val
    for name, part in (("rows.jsonl", rows[:num_train]), ("val.jsonl", rows[num_train:])):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def _row(directory: Path, number: int, picture: Picture) -> dict[str, Any]:
    """Write a picture, and return its row."""
    name = f"images/{number:05d}.png"
    picture.image.save(directory / name)
    messages = [
        {"role": "user", "content": f"<image>{picture.question}"},
        {"role": "assistant", "content": picture.answer},
    ]
    return {"messages": messages, "images": [name], "channel": picture.channel}


def _paper(rng: random.Random, limits: Limits) -> Image.Image:
    """Return an empty picture."""
    return Image.new("RGB", (limits.side, limits.side), rng.choice(BACKGROUNDS))


def _draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, box: tuple[float, float, float, float], color: tuple[int, int, int]
) -> None:
    left, top, right, bottom = box
    if shape == "circle":
        draw.ellipse(box, fill=color)
    elif shape == "square":
        draw.rectangle(box, fill=color)
    else:
        draw.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=color)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="directory for rows and pictures")
    parser.add_argument("--max_rows", type=int, default=20000, help="rows for training (default: 20000)")
    parser.add_argument("--val_rows", type=int, default=200, help="rows for validation (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the pictures (default: 0)")
    parser.add_argument("--side", type=int, default=48, help="width and height in pixels, at least 24 (default: 48)")
    parser.add_argument("--max_shapes", type=int, default=5, help="largest number of shapes, at most 9 (default: 5)")
    parser.add_argument("--digits", type=int, default=1, help="digits of a number, at most 3 (default: 1)")
    args = parser.parse_args()
    limits = Limits(args.side, args.max_shapes, args.digits)
    write(args.output_dir, make_pictures(args.max_rows + args.val_rows, args.seed, limits), args.val_rows)


if __name__ == "__main__":
    main()
