//! Sizes and resizing.

use qhx_kit::vision::{
    Filter, Image, Resizer, Size, aspect_ratio_preserving_size, smart_resize, smart_resize_video,
};
use qhx_op::Segment;
use serde::Deserialize;

use super::{goldens, image, sha256};

fn size([width, height]: [u32; 2]) -> Size {
    Size { width, height }
}

#[derive(Deserialize)]
struct Resize {
    filter: Filter,
    seed: u32,
    from: [u32; 2],
    to: [u32; 2],
    sha256: String,
    last_row: Vec<u8>,
}

#[test]
fn every_size_gives_the_bytes_of_torchvision() {
    let cases: Vec<Resize> = goldens("/resize");
    assert!(cases.len() >= 2 * 8, "eight sizes with each filter");
    compare(cases);
}

#[test]
fn lanczos_gives_the_bytes_of_pillow() {
    let text = include_str!("../../../../tests/fixtures/shape/lanczos.json");
    let mut all: serde_json::Value = serde_json::from_str(text).unwrap();
    let cases: Vec<Resize> = serde_json::from_value(all["resize"].take()).unwrap();
    assert!(cases.len() >= 8, "eight sizes");
    compare(cases);
}

fn compare(cases: Vec<Resize>) {
    let mut resizers = [Filter::Bicubic, Filter::Bilinear, Filter::Lanczos].map(Resizer::new);
    for case in cases {
        let [width, height] = case.from;
        let rgb = image(width, height, case.seed);
        let source = Image::new(&rgb, width, height).unwrap();
        let what = format!("{:?} {:?} to {:?}", case.filter, case.from, case.to);
        let done = resizers[case.filter as usize].resize(source, size(case.to)).unwrap();
        assert_eq!(done.size(), size(case.to), "{what}");
        let row = case.to[0] as usize * 3;
        let last = &done.rgb()[done.rgb().len() - row..];
        assert_eq!(last[..case.last_row.len()], case.last_row, "{what}");
        assert_eq!(sha256(done.rgb()), case.sha256, "{what}");
    }
}

#[test]
fn a_resizer_keeps_nothing_of_the_image_before() {
    let mut used = Resizer::default();
    let (large, small) = (image(90, 80, 1), image(33, 41, 2));
    let large = Image::new(&large, 90, 80).unwrap();
    let small = Image::new(&small, 33, 41).unwrap();
    used.resize(large, size([64, 96])).unwrap();
    let to = size([16, 16]);
    let again = used.resize(small, to).unwrap().rgb().to_vec();
    assert_eq!(again, Resizer::default().resize(small, to).unwrap().rgb());
    // Same size: the very pixels.
    let same = used.resize(small, small.size()).unwrap();
    assert_eq!(same.rgb().as_ptr(), small.rgb().as_ptr());
}

#[derive(Deserialize)]
struct Smart {
    from: [u32; 2],
    factor: u32,
    pixels: [u64; 2],
    to: Option<[u32; 2]>,
}

#[derive(Deserialize)]
struct Film {
    from: [u32; 2],
    frames: usize,
    factor: u32,
    pixels: [u64; 2],
    to: Option<[u32; 2]>,
}

#[derive(Deserialize)]
struct Budget {
    from: [u32; 2],
    patch: u32,
    pool: u32,
    patches: u32,
    to: Option<[u32; 2]>,
}

#[test]
fn target_sizes_are_those_of_the_processors() {
    let smart: Vec<Smart> = goldens("/sizes/smart_resize");
    for case in &smart {
        let [min, max] = case.pixels;
        let to = smart_resize(size(case.from), case.factor, min, max).ok();
        assert_eq!(to, case.to.map(size), "{:?}, factor {}", case.from, case.factor);
    }
    assert!(smart.iter().any(|case| case.to.is_none()), "a refused ratio");
    let videos: Vec<Film> = goldens("/sizes/smart_resize_video");
    for case in &videos {
        let ([min, max], frames) = (case.pixels, [case.frames, 2]);
        let to = smart_resize_video(size(case.from), frames, case.factor, min, max).ok();
        assert_eq!(to, case.to.map(size), "{:?}, {frames:?}, factor {}", case.from, case.factor);
    }
    assert!(videos.iter().any(|case| case.to.is_none()), "a refused ratio");
    for case in goldens::<Vec<Budget>>("/sizes/aspect_ratio_preserving_size") {
        let Budget { patch, pool, patches, .. } = case;
        let to = aspect_ratio_preserving_size(size(case.from), patch, pool, patches).ok();
        assert_eq!(to, case.to.map(size), "{:?}, {patch}, {pool}, {patches}", case.from);
    }
}

#[test]
fn pixels_that_are_no_image_are_refused() {
    for (bytes, width, height) in
        [(0, 0, 4), (0, 4, 0), (47, 4, 4), (49, 4, 4), (3, u32::MAX, u32::MAX)]
    {
        let error = Image::new(&vec![0; bytes], width, height).unwrap_err();
        assert!(error.message().contains(&format!("{width}×{height}")), "{error}");
        assert!(error.message().contains("expected"), "{error}");
    }
    let tokens = Segment::Tokens(&[1]);
    assert!(Image::of_segment(&tokens).unwrap_err().message().contains("not an image"));
    let rgb = [7; 12];
    let segment = Segment::Image { rgb: &rgb, width: 2, height: 2 };
    let found = Image::of_segment(&segment).unwrap();
    assert_eq!(found.rgb(), rgb);
    for to in [[0, 4], [4, 0], [u32::MAX, 1], [1, u32::MAX]] {
        let error = Resizer::default().resize(found, size(to)).unwrap_err();
        assert!(error.message().contains("2×2"), "{error}");
    }
}
