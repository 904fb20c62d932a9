//! Files that are no images or audio, are broken, or cost too much. Each is one error that names the file.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's helpers fail the test")]

mod common;

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use common::fixture;
use qhx_base::{Error, ErrorKind};
use qhx_media::{AudioRules, ImageRules, Limits, Source, decode_audio, decode_image};

fn bytes(name: &str, bytes: impl Into<Vec<u8>>) -> Source {
    Source::Bytes { name: name.to_owned(), bytes: bytes.into() }
}

fn no_image(source: &Source) -> Error {
    decode_image(source, &ImageRules::default(), &Limits::default()).unwrap_err()
}

fn no_audio(source: &Source) -> Error {
    decode_audio(source, &AudioRules::default(), &Limits::default()).unwrap_err()
}

/// The message begins with the name, and there is a likely fix.
#[track_caller]
fn says(error: &Error, name: &str, what: &str) {
    assert!(error.message().starts_with(&format!("{name}: ")), "{error}");
    assert!(error.message().contains(what), "{error}");
    assert!(error.hint_text().is_some(), "{error}");
    assert_eq!(error.kind(), ErrorKind::Prompt, "{error}");
}

fn png_header(width: u32, height: u32) -> Vec<u8> {
    let mut header = b"IHDR".to_vec();
    header.extend(width.to_be_bytes());
    header.extend(height.to_be_bytes());
    header.extend([8, 2, 0, 0, 0]);
    let mut crc = crc32fast::Hasher::new();
    crc.update(&header);
    let mut png = b"\x89PNG\r\n\x1a\n\0\0\0\x0d".to_vec();
    png.extend(header);
    png.extend(crc.finalize().to_be_bytes());
    png.extend(b"\0\0\0\x04IDATabcd");
    png
}

#[test]
fn images_with_too_many_pixels_are_refused_by_their_header() {
    let error = no_image(&bytes("bomb.png", png_header(50_000, 50_000)));
    says(&error, "bomb.png", "50000 × 50000 pixels are 2500.0 megapixels, at most 120.0 are read");
    let mut gif = b"GIF89a\xff\xff\xff\xff\0\0\0".to_vec();
    gif.extend(b",\0\0\0\0\xff\xff\xff\xff\0\x02\x02L\x01\0;");
    says(&no_image(&bytes("bomb.gif", gif)), "bomb.gif", "65535 × 65535 pixels");
    let mut webp = b"RIFF\x30\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0".to_vec();
    webp.extend([0xff, 0xff, 0, 0xff, 0xff, 0]);
    webp.extend(b"VP8L\x10\0\0\0/\xff\xff\xff\x0f\0\0\0\0\0\0\0\0\0\0\0");
    let error = no_image(&bytes("bomb.webp", webp));
    assert!(error.message().starts_with("bomb.webp: "), "{error}");
    // A phone's image of 108 megapixels may be read; here it is only a header.
    says(
        &no_image(&bytes("phone.png", png_header(12_000, 9_000))),
        "phone.png",
        "broken or cut-off PNG",
    );
}

#[test]
fn jpeg_headers_are_judged_before_pixels_are_allocated() {
    let mut jpeg = std::fs::read(fixture("baseline.jpg")).unwrap();
    let frame = jpeg.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
    jpeg[frame + 5..frame + 9].fill(0xff);
    says(&no_image(&bytes("bomb.jpg", jpeg)), "bomb.jpg", "65535 × 65535 pixels");
}

#[test]
fn images_without_pixels_are_refused() {
    says(&no_image(&bytes("flat.png", png_header(0, 5))), "flat.png", "");
    says(&no_image(&bytes("flat.gif", b"GIF89a\0\0\x05\0\0\0\0;")), "flat.gif", "");
    let mut jpeg = std::fs::read(fixture("baseline.jpg")).unwrap();
    let frame = jpeg.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
    jpeg[frame + 5..frame + 7].fill(0);
    says(&no_image(&bytes("flat.jpg", jpeg)), "flat.jpg", "");
}

#[test]
fn an_image_of_which_a_part_is_missing_is_refused() {
    let names = [
        "baseline.jpg",
        "progressive.jpg",
        "cmyk.jpg",
        "rgba.png",
        "grey16.png",
        "palette.png",
        "lossy.webp",
        "lossless.webp",
        "alpha.webp",
        "still.gif",
    ];
    for name in names {
        let whole = std::fs::read(fixture(name)).unwrap();
        for percent in [3, 30, 60, 90] {
            let cut =
                bytes(&format!("cut {name}"), &whole[..(whole.len() * percent / 100).max(13)]);
            let error = no_image(&cut);
            says(&error, &format!("cut {name}"), "broken or cut-off");
        }
    }
}

#[test]
fn a_truncated_jpeg_with_an_end_marker_is_refused() {
    for name in ["baseline.jpg", "progressive.jpg", "cmyk.jpg", "grey.jpg"] {
        let whole = std::fs::read(fixture(name)).unwrap();
        let data = whole.windows(2).position(|marker| marker == [0xff, 0xda]).unwrap() + 16;
        for cut in [data, (data + whole.len()) / 2, whole.len() - 6] {
            let mut bytes = whole[..cut].to_vec();
            // No marker may begin at the cut.
            while bytes.last() == Some(&0xff) {
                bytes.pop();
            }
            bytes.extend([0xff, 0xd9]);
            let error = no_image(&Source::Bytes { name: "cut".to_owned(), bytes });
            says(&error, "cut", "a broken or cut-off JPEG file");
        }
    }
}

#[test]
fn what_is_no_image_is_named() {
    let heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic";
    let avif = b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf";
    let cases: [(&str, &[u8], &str, &str); 10] = [
        ("notes.png", "Straße\nand so on".as_bytes(), "found text", "meant"),
        ("a.heic", heic, "image/heif", "convert it to PNG"),
        ("a.avif", avif, "image/avif", "convert it to PNG"),
        ("a.tiff", b"II*\0\x08\0\0\0\0\0\0\0", "image/tiff", "convert it to PNG"),
        ("a.bmp", b"BM\x46\0\0\0\0\0\0\0\x36\0\0\0", "image/bmp", "convert it to PNG"),
        ("a.pdf", b"%PDF-1.7\n%\xff\xff", "application/pdf", "convert it to PNG"),
        ("a.wav", b"RIFF\x24\0\0\0WAVEfmt ", "found audio (WAV)", "as audio"),
        ("a.mp3", b"\xff\xfb\x90\x64\0\0", "found audio (MP3)", "as audio"),
        ("a.bin", b"\0\x01\x02\x03", "begins with the bytes 00 01 02 03", "convert it"),
        ("short", b"\x89", "begins with the bytes 89", "convert it"),
    ];
    for (name, content, what, fix) in cases {
        let error = no_image(&bytes(name, content));
        says(&error, name, what);
        assert!(error.message().contains("expected an image (PNG, JPEG, WebP, GIF)"), "{error}");
        assert!(error.hint_text().unwrap().contains(fix), "{}", error.report());
    }
}

#[test]
fn what_is_no_audio_is_named() {
    let heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic";
    let cases: [(&str, Vec<u8>, &str); 5] = [
        ("notes.wav", b"la la la".to_vec(), "found text"),
        ("a.aiff", b"FORM\0\0\0\x10AIFFCOMM".to_vec(), "audio/x-aiff"),
        ("a.heic", heic.to_vec(), "image/heif"),
        ("a.png", std::fs::read(fixture("la.png")).unwrap(), "found an image (PNG)"),
        ("a.w64", b"RF64\xff\xff\xff\xffWAVEds64".to_vec(), "an RF64 file"),
    ];
    for (name, content, what) in cases {
        let error = no_audio(&bytes(name, content));
        says(&error, name, what);
        assert!(error.message().contains("expected audio (WAV, FLAC, MP3, AAC, M4A"), "{error}");
    }
    let error = no_audio(&Source::File(fixture("ima_adpcm.wav")));
    assert!(error.message().contains("a WAV file whose coding is not understood"), "{error}");
    let mut malformed = std::fs::read(fixture("extensible.wav")).unwrap();
    let kind = malformed.windows(4).position(|four| four == [1, 0, 0, 0]).unwrap();
    malformed[kind] = 9;
    let error = no_audio(&bytes("malformed.wav", malformed));
    says(&error, "malformed.wav", "a WAV file of a kind that is not read");
}

#[test]
fn what_is_no_file_is_an_error_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty.png");
    std::fs::write(&empty, "").unwrap();
    let gone = dir.path().join("gone.png");
    let mut cases = vec![
        (empty, "the file is empty (0 bytes)"),
        (gone, "such file"),
        (dir.path().to_owned(), "a folder, expected a regular file"),
    ];
    if cfg!(unix) {
        let fifo = dir.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        cases.push((fifo, "a FIFO, expected a regular file"));
        cases.push((Path::new("/dev/zero").to_owned(), "a device, expected a regular file"));
    }
    for (path, what) in cases {
        let source = Source::File(path.clone());
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || send.send((no_image(&source), no_audio(&source))));
        let (first, second) = receive.recv_timeout(Duration::from_secs(20)).expect(what);
        for error in [first, second] {
            assert!(error.message().starts_with(&path.display().to_string()), "{error}");
            assert!(error.message().contains(what), "{error}");
        }
    }
}

#[test]
fn files_larger_than_the_limit_are_not_read() {
    let mut limits = Limits::default();
    limits.bytes = 1000;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large");
    std::fs::write(&path, [0; 1001]).unwrap();
    for source in [Source::File(path), bytes("large", [0; 1001])] {
        let pixels = decode_image(&source, &ImageRules::default(), &limits).unwrap_err();
        let samples = decode_audio(&source, &AudioRules::default(), &limits).unwrap_err();
        assert!(
            pixels.message().ends_with("large: larger than 1000 bytes")
                || pixels.message() == "large: larger than 1000 bytes",
            "{pixels}"
        );
        assert!(samples.message().ends_with("larger than 1000 bytes"), "{samples}");
    }
}

/// A WAV header of 16-bit mono at 16 kHz that promises `data` bytes, and what follows it.
fn wav(rate: u32, riff: u32, data: u32, body: &[u8]) -> Vec<u8> {
    let mut wav = b"RIFF".to_vec();
    wav.extend(riff.to_le_bytes());
    wav.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    wav.extend(rate.to_le_bytes());
    wav.extend(rate.wrapping_mul(2).to_le_bytes());
    wav.extend(b"\x02\0\x10\0data");
    wav.extend(data.to_le_bytes());
    wav.extend(body);
    wav
}

#[test]
fn headers_that_promise_more_audio_are_refused() {
    let hours = 10 * 3600 * 16_000 * 2;
    let body = [1; 1000];
    let error = no_audio(&bytes("ten.wav", wav(16_000, hours + 36, hours, &body)));
    says(
        &error,
        "ten.wav",
        "its header declares 1152000000 bytes of audio, the file has 1044 in all",
    );
    for (riff, data) in [(u32::MAX - 8, u32::MAX - 44), (1036, 4_000_000_000), (1036, u32::MAX)] {
        let error = no_audio(&bytes("four.wav", wav(16_000, riff, data, &body)));
        says(&error, "four.wav", "broken or cut-off WAV");
    }
    let error = no_audio(&bytes("pipe.wav", wav(16_000, u32::MAX, u32::MAX, &body)));
    says(&error, "pipe.wav", "header does not declare how long it is");
    for rate in [0, 1, 999, 768_001, u32::MAX] {
        let error = no_audio(&bytes("rate.wav", wav(rate, 1036, 1000, &body)));
        says(&error, "rate.wav", "");
    }
    let error = no_audio(&bytes("none.wav", wav(16_000, 36, 0, &[])));
    assert_eq!(error.message(), "none.wav: holds no audio (0 samples)");
}

#[test]
fn long_audio_is_refused_before_it_is_decoded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ten.wav");
    let bytes = 10 * 3600 * 2000;
    std::fs::write(&path, wav(1000, bytes + 36, bytes, &[])).unwrap();
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(u64::from(bytes) + 44)
        .unwrap();
    let error = no_audio(&Source::File(path.clone()));
    says(
        &error,
        &path.display().to_string(),
        "audio of 36000 seconds or more, at most 7200 are read",
    );
    let mut limits = Limits::default();
    limits.seconds = 0;
    for name in ["tone.mp3", "tone.ogg", "tone16.flac"] {
        let source = Source::File(fixture(name));
        let error = decode_audio(&source, &AudioRules::default(), &limits).unwrap_err();
        assert!(error.message().contains("at most 0 are read"), "{error}");
    }
}

#[test]
fn audio_of_which_a_part_is_missing_is_refused() {
    for name in ["tone.mp3", "tone.ogg", "tone16.flac", "tone24.flac", "double.wav", "pcm_24.wav"] {
        let whole = std::fs::read(fixture(name)).unwrap();
        for percent in [2, 30, 60, 90] {
            let cut =
                bytes(&format!("cut {name}"), &whole[..(whole.len() * percent / 100).max(12)]);
            says(&no_audio(&cut), &format!("cut {name}"), "broken or cut-off");
        }
    }
}

#[test]
fn opus_and_aac_that_are_cut_off_are_refused() {
    let names =
        ["voice.opus", "stereo.webm", "voice.m4a", "fragments.mp4", "opus.mp4", "voice.aac"];
    for name in names {
        let whole = std::fs::read(fixture(name)).unwrap();
        let ends = (8..whole.len()).step_by(61).chain(whole.len() - 9..whole.len());
        for end in ends {
            let cut = bytes("cut", &whole[..end]);
            let read = decode_audio(&cut, &AudioRules::default(), &Limits::default());
            match read {
                Err(error) => says(&error, "cut", ""),
                // A page of Ogg and a frame of AAC may be the last.
                Ok(_) => assert!(["voice.opus", "voice.aac"].contains(&name), "{name}: {end}"),
            }
        }
    }
    // A recording declares no length, and ends behind any of its blocks, not within one.
    let whole = std::fs::read(fixture("recorded.webm")).unwrap();
    let block = (0..whole.len() - 4)
        .rfind(|&at| whole[at] == 0xa3 && whole[at + 2..at + 4] == [0x81, 0])
        .unwrap();
    let read = |end: usize| {
        let cut = bytes("cut.webm", &whole[..end]);
        decode_audio(&cut, &AudioRules::default(), &Limits::default())
    };
    says(&read(block - 1).unwrap_err(), "cut.webm", "a broken or cut-off WebM file: its last part");
    let last_cluster = whole.windows(4).rposition(|id| id == [0x1f, 0x43, 0xb6, 0x75]).unwrap();
    assert!(read(last_cluster).unwrap().samples.len() > 2000);
}

#[test]
fn an_mp4_file_without_audio_is_named() {
    let error = no_audio(&Source::File(fixture("silent.mp4")));
    assert!(error.message().contains("the MP4 file has no audio track that is read"), "{error}");
}

#[test]
fn hours_of_aac_and_opus_are_refused_before_they_are_there() {
    let mut m4a = std::fs::read(fixture("voice.m4a")).unwrap();
    // No edit says otherwise, and every packet is said to last an hour and more.
    let edits = m4a.windows(4).position(|name| name == b"edts").unwrap();
    m4a[edits..edits + 4].copy_from_slice(b"free");
    let duration = m4a.windows(4).position(|name| name == b"stts").unwrap() + 16;
    m4a[duration..duration + 4].copy_from_slice(&(1u32 << 28).to_be_bytes());
    let error = no_audio(&bytes("ten.m4a", m4a));
    says(&error, "ten.m4a", "seconds or more, at most 7200 are read");
    // The second cluster is said to be weeks later.
    let mut webm = std::fs::read(fixture("recorded.webm")).unwrap();
    let clusters: Vec<usize> = (0..webm.len() - 14)
        .filter(|&at| webm[at..].starts_with(&[0x1f, 0x43, 0xb6, 0x75]))
        .collect();
    let time = clusters[1] + 12;
    assert_eq!(webm[time], 0xe7);
    let length = usize::from(webm[time + 1] & 0x7f);
    webm.splice(time + 1..time + 2 + length, [0x84, 0x7f, 0xff, 0xff, 0xff]);
    let error = no_audio(&bytes("gap.webm", webm));
    says(&error, "gap.webm", "seconds or more, at most 7200 are read");
}

#[test]
fn an_mp3_that_lacks_one_byte_is_cut_off() {
    let whole = std::fs::read(fixture("tone.mp3")).unwrap();
    // Within the last frame, and within the header of a frame that follows.
    for end in [whole.len() - 1, whole.len() - 50] {
        let error = no_audio(&bytes("cut.mp3", &whole[..end]));
        says(&error, "cut.mp3", "a broken or cut-off MP3 file: its last frame lacks");
    }
    for begun in 1..4 {
        let mut more = whole.clone();
        more.extend_from_within(..begun);
        says(&no_audio(&bytes("cut.mp3", more)), "cut.mp3", "its last frame lacks");
    }
}

#[test]
fn samples_that_are_no_numbers_are_named() {
    for (value, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let mut samples = vec![0.25f32; 3000];
        samples[1600] = value;
        for rate in [16_000, 8_000] {
            let spec = hound::WavSpec {
                channels: 1,
                sample_rate: rate,
                bits_per_sample: 32,
                sample_format: hound::SampleFormat::Float,
            };
            let mut file = std::io::Cursor::new(Vec::new());
            let mut writer = hound::WavWriter::new(&mut file, spec).unwrap();
            samples.iter().for_each(|&sample| writer.write_sample(sample).unwrap());
            writer.finalize().unwrap();
            let seconds = 1600.0 / f64::from(rate);
            let what = format!("sample 1600 (at {seconds:.3} s) is {shown}, expected −1 to 1");
            says(&no_audio(&bytes("bad.wav", file.into_inner())), "bad.wav", &what);
        }
    }
}

#[test]
fn channels_beyond_the_mask_are_refused() {
    let seed = qhx_paths::workspace().join("tests/fuzz/seeds/audio/extensible.wav");
    let audio_of = |channels: u16, mask: u32| {
        let mut file = std::fs::read(&seed).unwrap();
        let format = file.windows(4).position(|name| name == b"fmt ").unwrap() + 8;
        file[format + 2..][..2].copy_from_slice(&channels.to_le_bytes());
        file[format + 20..][..4].copy_from_slice(&mask.to_le_bytes());
        bytes("many.wav", file)
    };
    for (channels, mask) in [(u16::MAX, 3), (32, 0), (2, 1 << 31)] {
        let error = no_audio(&audio_of(channels, mask));
        let what =
            format!("its header declares {channels} channels with the channel mask {mask:#x}");
        says(&error, "many.wav", &what);
    }
    // A mask with bits missing or too many is no reason to refuse audio.
    for mask in [0, 1, 3, 7, u32::MAX] {
        let channels = decode_audio(&audio_of(2, mask), &AudioRules::default(), &Limits::default());
        assert!(channels.is_ok(), "{mask}: {channels:?}");
    }
}
