//! Videos: which frames are taken, when they are shown, and their pixels.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's helpers fail the test")]

mod common;

use std::path::Path;

use common::{file, golden};
use image::{Delay, Frame, Rgb, RgbImage, RgbaImage};
use qhx_media::{Frames, ImageRules, Limits, Source, VideoRules, decode_video};

const SIZE: usize = 40 * 24 * 3;

fn rules(fps: f32) -> VideoRules {
    let mut rules = VideoRules::default();
    rules.fps = fps;
    rules
}

fn read(source: &Source, rules: &VideoRules) -> Frames {
    let frames = decode_video(source, rules, &ImageRules::default(), &Limits::default());
    let frames = frames.unwrap_or_else(|e| panic!("{}", e.report()));
    let size = frames.width as usize * frames.height as usize * 3;
    assert_eq!(frames.rgb.len(), frames.times.len() * size);
    frames
}

/// Twelve frames, shown for 0.1 and 0.3 s in turns: 2.4 s.
fn starts() -> Vec<f32> {
    let start = |i: i32| (i / 2 * 400 + i % 2 * 100) as f32 / 1000.0;
    (0..12).map(start).collect()
}

#[test]
fn animations_of_all_formats_give_their_frames_with_their_times() {
    for name in ["animated.gif", "animated.png", "animated.webp"] {
        let all = read(&file(name), &rules(100.0));
        assert_eq!(all.times, starts(), "{name}");
        assert_eq!(all.rgb, *golden(name).as_raw(), "{name}");
        // 2.4 s at 2 a second; numpy.linspace(0, 11, 4).round() is [0, 4, 7, 11].
        let some = read(&file(name), &rules(2.0));
        let expected = [0, 4, 7, 11];
        assert_eq!(some.times, expected.map(|i| starts()[i]), "{name}");
        for (frame, i) in some.rgb.chunks_exact(SIZE).zip(expected) {
            assert_eq!(frame, &all.rgb[i * SIZE..][..SIZE], "{name}: frame {i}");
        }
    }
}

#[test]
fn frames_are_between_min_and_max() {
    let mut few = rules(0.1);
    few.min_frames = 3;
    // numpy.linspace(0, 11, 3).round() is [0, 6, 11]: half to even.
    assert_eq!(read(&file("animated.gif"), &few).times, [0, 6, 11].map(|i| starts()[i]));
    few.max_frames = 1;
    assert_eq!(read(&file("animated.gif"), &few).times, [0.0]);
    let mut many = rules(2.0);
    many.min_frames = 50;
    assert_eq!(read(&file("animated.gif"), &many).times, starts());
}

/// A folder of images of one colour each: image `n` is of grey `n`.
fn folder(count: u8) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for n in 0..count {
        save(dir.path(), &format!("frame{n}.png"), n, (4, 2));
    }
    std::fs::write(dir.path().join(".hidden"), "no image").unwrap();
    dir
}

fn save(dir: &Path, name: &str, grey: u8, (width, height): (u32, u32)) {
    RgbImage::from_pixel(width, height, Rgb([grey; 3])).save(dir.join(name)).unwrap();
}

#[test]
fn a_folder_is_sorted_by_numbers_and_each_image_is_a_frame() {
    let dir = folder(12);
    let source = Source::File(dir.path().to_owned());
    let frames = read(&source, &rules(4.0));
    let greys: Vec<u8> = frames.rgb.chunks_exact(4 * 2 * 3).map(|frame| frame[0]).collect();
    assert_eq!(greys, (0..12).collect::<Vec<u8>>());
    assert_eq!(frames.times, (0..12).map(|i| i as f32 / 4.0).collect::<Vec<f32>>());
    let mut thinned = rules(4.0);
    thinned.max_frames = 5;
    // numpy.linspace(0, 11, 5).round() is [0, 3, 6, 8, 11].
    let frames = read(&source, &thinned);
    let greys: Vec<u8> = frames.rgb.chunks_exact(4 * 2 * 3).map(|frame| frame[0]).collect();
    assert_eq!(greys, [0, 3, 6, 8, 11]);
    assert_eq!(frames.times, [0.0, 0.75, 1.5, 2.0, 2.75]);
}

fn refused(source: &Source, rules: &VideoRules, limits: &Limits) -> String {
    let error = decode_video(source, rules, &ImageRules::default(), limits).unwrap_err();
    error.report().to_string()
}

#[test]
fn folders_that_are_no_video_are_refused() {
    let (limits, standard) = (Limits::default(), rules(2.0));
    let empty = tempfile::tempdir().unwrap();
    let says = refused(&Source::File(empty.path().to_owned()), &standard, &limits);
    assert!(says.contains("no images in this folder"), "{says}");

    let dir = folder(3);
    let source = Source::File(dir.path().to_owned());
    save(dir.path(), "frame3.png", 0, (4, 3));
    let says = refused(&source, &standard, &limits);
    assert!(says.contains("frame3.png: 4 × 3 pixels"), "{says}");
    assert!(says.contains("the first frame of the video has 4 × 2"), "{says}");

    std::fs::write(dir.path().join("frame3.png"), "notes").unwrap();
    let says = refused(&source, &standard, &limits);
    assert!(says.contains("frame3.png: found text, expected an image"), "{says}");

    let mut small = Limits::default();
    small.frames = 3;
    let says = refused(&source, &standard, &small);
    assert!(says.contains("more frames than are read (3"), "{says}");
    std::fs::remove_file(dir.path().join("frame3.png")).unwrap();
    let mut small = Limits::default();
    small.video_pixels = 3 * 4 * 2 - 1;
    let says = refused(&source, &standard, &small);
    assert!(says.contains("3 frames of 4 × 2 are"), "{says}");
}

#[test]
fn still_images_audio_and_a_rate_of_zero_are_refused() {
    let limits = Limits::default();
    for name in ["still.gif", "la.png", "baseline.jpg", "lossless.webp"] {
        let says = refused(&file(name), &rules(2.0), &limits);
        assert!(says.contains("image that is not animated, expected a video"), "{says}");
    }
    let says = refused(&file("tone.mp3"), &rules(2.0), &limits);
    assert!(says.contains("found audio (MP3), expected a video"), "{says}");
    for fps in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let says = refused(&file("animated.gif"), &rules(fps), &limits);
        assert!(says.contains("frames per second, expected a number above 0"), "{says}");
    }
    let mp4 = Source::Bytes {
        name: "clip".to_owned(),
        bytes: b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom".to_vec(),
    };
    let says = refused(&mp4, &rules(2.0), &limits);
    assert!(says.contains("clip: found a file of type video/mp4"), "{says}");
    assert!(says.contains("ffmpeg"), "{says}");
}

/// Ten thousand frames, each shown for 10 ms, which counts as 100: 1000 s.
fn long_gif(size: u32) -> Source {
    let mut bytes = Vec::new();
    let mut encoder = image::codecs::gif::GifEncoder::new_with_speed(&mut bytes, 30);
    for n in 0..10_000u32 {
        let grey = (n % 250) as u8;
        let frame = RgbaImage::from_pixel(size, size, image::Rgba([grey, grey, grey, 255]));
        let frame = Frame::from_parts(frame, 0, 0, Delay::from_numer_denom_ms(10, 1));
        encoder.encode_frame(frame).unwrap();
    }
    drop(encoder);
    Source::Bytes { name: "long.gif".to_owned(), bytes }
}

#[test]
fn only_sampled_frames_take_memory() {
    let long = long_gif(4);
    let mut limits = Limits::default();
    // What 768 frames take, and not one more.
    limits.video_pixels = 768 * 16;
    let frames = decode_video(&long, &rules(2.0), &ImageRules::default(), &limits).unwrap();
    assert_eq!(frames.times.len(), 768);
    assert_eq!((frames.times[0], frames.times[767]), (0.0, 999.9));
    // All of them have 64 times the pixels at most.
    limits.video_pixels = 10_000 * 16 / 64 - 1;
    let mut few = rules(2.0);
    few.max_frames = 4;
    let says = refused(&long, &few, &limits);
    assert!(says.contains("long.gif: more frames than are read"), "{says}");
}

#[test]
fn an_animation_that_is_cut_off_is_refused() {
    for name in ["animated.gif", "animated.png", "animated.webp"] {
        let bytes = std::fs::read(common::fixture(name)).unwrap();
        for part in [bytes.len() / 2, bytes.len() * 9 / 10] {
            let cut = Source::Bytes { name: format!("cut {name}"), bytes: bytes[..part].to_vec() };
            let says = refused(&cut, &rules(2.0), &Limits::default());
            assert!(says.contains(&format!("cut {name}: a broken or cut-off")), "{says}");
        }
    }
}
