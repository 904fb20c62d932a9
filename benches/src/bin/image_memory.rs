//! Time and memory of taking in a 12-megapixel photograph: a JPEG file that this program makes first. It is decoded,
//! and then resized as vision towers get it.

#![expect(clippy::print_stdout, reason = "the report is the result")]

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use image::codecs::jpeg::JpegEncoder;
use image::{ExtendedColorType, ImageEncoder as _};
use qhx_benches::memory::peak_and_anonymous;
use qhx_kit::vision::{Filter, Image, Resizer, Size};
use qhx_media::{ImageRules, Limits, Source, decode_image};

const WIDTH: u32 = 4000;
const HEIGHT: u32 = 3000;
/// Size after resizing: three quarters of a megapixel.
const TARGET: Size = Size { width: 1024, height: 768 };

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A process of its own decodes, so that making the file does not count.
    if let Some(path) = std::env::args_os().nth(1) {
        return decode(path.as_ref());
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("photograph.jpg");
    make(&path)?;
    let status = Command::new(std::env::current_exe()?).arg(&path).status()?;
    if status.success() { Ok(()) } else { Err(status.to_string().into()) }
}

/// Soft colours with noise, which makes a file as large as a camera's.
fn make(path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let mut noise = 1u32;
    let rgb: Vec<u8> = (0..WIDTH * HEIGHT)
        .flat_map(|i| {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (x, y, n) = (i % WIDTH, i / WIDTH, noise >> 28);
            [x * 240 / WIDTH + n, y * 240 / HEIGHT + n, (x + y) / 30 % 240 + n].map(|v| v as u8)
        })
        .collect();
    let file = std::io::BufWriter::new(std::fs::File::create(path)?);
    let encoder = JpegEncoder::new_with_quality(file, 92);
    Ok(encoder.write_image(&rgb, WIDTH, HEIGHT, ExtendedColorType::Rgb8)?)
}

fn decode(path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let bytes = std::fs::metadata(path)?.len();
    let (before, _) = peak_and_anonymous();
    let start = Instant::now();
    let source = Source::File(path.to_owned());
    let image = decode_image(&source, &ImageRules::default(), &Limits::default())?;
    let time = start.elapsed();
    let (peak, held) = peak_and_anonymous();
    println!(
        "JPEG of {} × {} pixels, {:.1} MB: {:.1} MB of RGB",
        image.width,
        image.height,
        mb(bytes),
        mb(image.rgb.len() as u64)
    );
    println!("decoded in {:.0} ms", time.as_secs_f64() * 1e3);
    println!(
        "peak RSS before {:.1} MB, after {:.1} MB (held: {:.1} MB)",
        mb(before),
        mb(peak),
        mb(held)
    );
    let start = Instant::now();
    let mut resizer = Resizer::new(Filter::Bicubic);
    let pixels = Image::new(&image.rgb, image.width, image.height)?;
    let small = resizer.resize(pixels, TARGET)?;
    let time = start.elapsed();
    let (peak, _) = peak_and_anonymous();
    println!("resized to {} in {:.0} ms", small.size(), time.as_secs_f64() * 1e3);
    println!("peak RSS {:.1} MB", mb(peak));
    Ok(())
}
