"""Small images with something to say about them, drawn by arithmetic, so that nothing has to be fetched."""

import numpy as np
from PIL import Image, ImageDraw

# id: size (width, height), caption, colours. Sizes are such that the tiny model's limits keep, shrink and enlarge images.
IMAGES = {
    "boat": ((96, 72), "A red boat on a blue sea.", "Red, blue and white."),
    "tower": ((40, 88), "A grey tower with a green roof.", "Grey and green."),
    "train": ((150, 50), "A yellow train in the dark.", "Yellow and black."),
    "sun": ((20, 18), "The sun over a brown hill.", "Orange and brown."),
    "cross": ((48, 48), "A white cross on red.", "White and red."),
    "rings": ((48, 48), "Three rings side by side.", "Black and cream."),
    "fish": ((33, 61), "A silver fish swims down.", "Silver and teal."),
}
VIDEO = ((52, 34), "A ball rolls to the right.", 5)


def draw(id):
    """The image as RGB8."""
    (w, h), _, _ = IMAGES[id]
    y, x = np.mgrid[0:h, 0:w]
    shade = lambda a, b: np.stack([p + (q - p) * y / h for p, q in zip(a, b)], -1)
    if id == "boat":
        image, d = canvas(shade((235, 240, 250), (20, 60, 190)))
        d.polygon([(20, 45), (76, 45), (66, 60), (30, 60)], fill=(200, 25, 30))
        d.polygon([(46, 10), (46, 42), (70, 42)], fill=(250, 250, 250))
    elif id == "tower":
        image, d = canvas(shade((200, 215, 240), (190, 230, 200)))
        d.rectangle([12, 28, 28, 87], fill=(120, 120, 125))
        d.polygon([(8, 28), (20, 6), (32, 28)], fill=(20, 130, 50))
        d.rectangle([17, 44, 23, 54], fill=(40, 40, 60))
    elif id == "train":
        image, d = canvas(shade((5, 5, 12), (30, 28, 34)))
        for k in range(4):
            d.rectangle([6 + 36 * k, 14, 37 + 36 * k, 38], fill=(245, 200, 20))
            d.ellipse([12 + 36 * k, 34, 20 + 36 * k, 44], fill=(90, 90, 90))
    elif id == "sun":
        image, d = canvas(shade((250, 210, 130), (250, 150, 60)))
        d.ellipse([5, 2, 13, 10], fill=(255, 120, 10))
        d.polygon([(0, 17), (11, 9), (19, 17)], fill=(100, 60, 25))
    elif id == "cross":
        image, d = canvas(shade((215, 20, 40), (180, 10, 30)))
        d.rectangle([20, 8, 28, 40], fill=(255, 255, 255))
        d.rectangle([8, 20, 40, 28], fill=(255, 255, 255))
    elif id == "rings":
        image, d = canvas(shade((250, 245, 220), (240, 235, 205)))
        for k in range(3):
            d.ellipse([2 + 15 * k, 16, 15 + 15 * k, 30], outline=(10, 10, 10), width=2)
    else:
        image, d = canvas(shade((60, 160, 165), (10, 80, 95)))
        d.ellipse([10, 14, 23, 50], fill=(190, 195, 205))
        d.polygon([(16, 18), (7, 5), (26, 5)], fill=(165, 170, 185))
        d.point([(14, 42), (19, 42)], fill=(0, 0, 0))
    return image


def frames():
    """The frames of the video as RGB8, half a second apart."""
    (w, h), _, count = VIDEO
    out = []
    for k in range(count):
        y, _ = np.mgrid[0:h, 0:w]
        image, d = canvas(np.stack([210 - y, 225 - y, 180 + y], -1))
        d.ellipse([2 + 9 * k, 14, 13 + 9 * k, 25], fill=(170, 40, 140))
        out.append(image)
    return out


def canvas(values):
    image = Image.fromarray(np.clip(values, 0, 255).round().astype(np.uint8), "RGB")
    return image, ImageDraw.Draw(image)
