//! Images, compared with what Pillow and `transformers` make of the same files.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's helpers fail the test")]

mod common;

use common::{file, fixture, golden};
use qhx_media::{Alpha, Image, ImageRules, Limits, Source, decode_image};

fn read(name: &str, rules: &ImageRules) -> Image {
    decode_image(&file(name), rules, &Limits::default())
        .unwrap_or_else(|e| panic!("{}", e.report()))
}

/// The max and the mean difference to the golden of this name.
fn differences(image: &Image, name: &str) -> (u8, f64) {
    let golden = golden(name);
    assert_eq!((image.width, image.height), golden.dimensions(), "{name}");
    assert_eq!(image.rgb.len(), golden.as_raw().len(), "{name}");
    let pairs = image.rgb.iter().zip(golden.as_raw());
    let off: Vec<u8> = pairs.map(|(a, b)| a.abs_diff(*b)).collect();
    let mean = off.iter().copied().map(f64::from).sum::<f64>() / off.len() as f64;
    (off.into_iter().max().unwrap(), mean)
}

fn difference(image: &Image, name: &str) -> u8 {
    differences(image, name).0
}

fn drop_alpha() -> ImageRules {
    let mut rules = ImageRules::default();
    rules.alpha = Alpha::Drop;
    rules
}

#[test]
fn lossless_formats_are_equal_to_the_byte() {
    let names = ["lossless.webp", "grey16.png", "rgb16.png", "bits.png", "still.gif"];
    for name in names {
        assert_eq!(difference(&read(name, &ImageRules::default()), name), 0, "{name}");
    }
}

/// Decoders of JPEG may round each of the three planes by 1 otherwise, and smooth planes of half the size otherwise.
#[test]
fn jpeg_and_lossy_webp_differ_by_rounding() {
    let cases = [
        ("lossy.webp", 0, 0.0),
        ("grey.jpg", 1, 0.5),
        ("cmyk.jpg", 1, 0.5),
        ("exif1.jpg", 3, 0.5),
        ("baseline.jpg", 6, 1.0),
        ("progressive.jpg", 6, 1.0),
    ];
    for (name, max, mean) in cases {
        let off = differences(&read(name, &ImageRules::default()), name);
        assert!(off.0 <= max && off.1 <= mean, "{name}: {off:?}");
    }
}

#[test]
fn transparency_is_blended_over_white_or_dropped() {
    for name in ["rgba.png", "la.png", "alpha.webp", "palette.png", "key.png"] {
        let white = read(name, &ImageRules::default());
        assert_eq!(difference(&white, &format!("{name}.white")), 0, "{name}");
        let dropped = read(name, &drop_alpha());
        assert_eq!(difference(&dropped, &format!("{name}.drop")), 0, "{name}");
    }
}

#[test]
fn orientations_come_out_upright_unless_the_rule_forbids_it() {
    let mut lying = ImageRules::default();
    lying.upright = false;
    let first = read("exif1.jpg", &lying);
    for orientation in 1..=8 {
        let name = format!("exif{orientation}.jpg");
        let off = difference(&read(&name, &ImageRules::default()), &name);
        assert!(off <= 3, "{name}: {off}");
        assert_eq!(read(&name, &lying), first, "{name}");
    }
}

#[test]
fn an_animation_gives_its_first_frame() {
    let first = read("animated.png", &ImageRules::default());
    let frames = golden("animated.png");
    assert_eq!((first.width, first.height), (40, 24));
    assert_eq!(first.rgb, frames.as_raw()[..40 * 24 * 3]);
    for name in ["animated.gif", "animated.webp"] {
        let first = read(name, &ImageRules::default());
        assert_eq!(first.rgb, golden(name).as_raw()[..40 * 24 * 3], "{name}");
    }
}

#[test]
fn content_decides_and_not_the_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image.png");
    std::fs::copy(fixture("lossless.webp"), &path).unwrap();
    let renamed =
        decode_image(&Source::File(path), &ImageRules::default(), &Limits::default()).unwrap();
    assert_eq!(difference(&renamed, "lossless.webp"), 0);
}

#[test]
fn a_data_url_and_bytes_are_as_good_as_a_file() {
    use base64::Engine as _;
    let bytes = std::fs::read(fixture("la.png")).unwrap();
    let expected = read("la.png", &ImageRules::default());
    let limits = Limits::default();
    let url = base64::engine::general_purpose::STANDARD.encode(&bytes);
    let url = Source::parse(&format!("data:image/png;base64,{url}"), &limits).unwrap();
    let bytes = Source::Bytes { name: "upload 1".to_owned(), bytes };
    for source in [url, bytes] {
        assert_eq!(decode_image(&source, &ImageRules::default(), &limits).unwrap(), expected);
    }
}
