//! Shaping a 12-megapixel image and 30 seconds of audio as a host-op does, without decoding.
//!
//! Prints the best of several turns. The resize of the kit, width and then height, takes turns with one call of
//! `fast_image_resize`, which gives other pixels; log-mel features take turns with their Fourier transforms alone.

#![expect(clippy::print_stdout, reason = "the report is the result")]

use std::time::{Duration, Instant};

use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions};
use qhx_kit::audio::{
    Clip, Edge, FrontEnd, Log, LogMel, MelOptions, MelScale, Spectrum, Stft, Window,
};
use qhx_kit::vision::{
    Filter, Image as Pixels, Normalisation, PatchLayout, Patchify, Resizer, Size,
};

const FROM: Size = Size { width: 4032, height: 3024 };
const TO: Size = Size { width: 1024, height: 768 };
const TURNS: usize = 12;
const RATE: u32 = 16_000;
const SECONDS: usize = 30;

type Anything<T = ()> = Result<T, Box<dyn std::error::Error>>;

fn time(best: &mut Duration, run: impl FnOnce() -> Anything) -> Anything {
    let start = Instant::now();
    run()?;
    *best = start.elapsed().min(*best);
    Ok(())
}

fn main() -> Anything {
    image()?;
    audio()
}

fn image() -> Anything {
    let rgb: Vec<u8> = noise().map(|n| (n >> 24) as u8).take(FROM.area() as usize * 3).collect();
    let image = Pixels::new(&rgb, FROM.width, FROM.height)?;
    let mut resizer = Resizer::new(Filter::Bicubic);
    let mut once = fast_image_resize::Resizer::new();
    let options = ResizeOptions::new()
        .resize_alg(ResizeAlg::Convolution(FilterType::CatmullRom))
        .use_alpha(false);
    let mut target = Image::new(TO.width, TO.height, PixelType::U8x3);
    let normalisation = Normalisation::mean_std([0.5; 3], [0.5; 3], 1.0 / 255.0)?;
    let cut = Patchify::new(16, 2, PatchLayout::ChannelsFirst)?;
    let mut patches = vec![0.0; cut.grid(TO)?.patches() * cut.patch_len(2)];
    let (mut twice, mut one_call, mut patchify) = (Duration::MAX, Duration::MAX, Duration::MAX);
    for _ in 0..TURNS {
        time(&mut twice, || Ok(resizer.resize(image, TO).map(drop)?))?;
        time(&mut one_call, || {
            let source = ImageRef::new(FROM.width, FROM.height, &rgb, PixelType::U8x3)?;
            Ok(once.resize(&source, &mut target, &options)?)
        })?;
        let small = resizer.resize(image, TO)?;
        time(&mut patchify, || {
            Ok(cut.write(&[small; 2], &normalisation, &mut patches).map(drop)?)
        })?;
    }
    println!(
        "{FROM} to {TO}: width, then height {:.1} ms, in one call {:.1} ms, ratio {:.2}",
        ms(twice),
        ms(one_call),
        ms(twice) / ms(one_call)
    );
    println!("{TO} normalised and cut into patches of two frames: {:.1} ms", ms(patchify));
    Ok(())
}

fn audio() -> Anything {
    let count = SECONDS * RATE as usize;
    let samples: Vec<f32> = noise().map(|n| n as i32 as f32 / 2f32.powi(32)).take(count).collect();
    let clip = Clip::new(&samples, RATE, RATE)?;
    let (frame, hop, fft, window) = (320, 160, 512, Window::PeriodicHann);
    let (scale, max_hz) = (MelScale::Htk, 8000.0);
    let filters = MelOptions { mels: 128, min_hz: 0.0, max_hz, scale, area_norm: false };
    let (spectrum, edge, log) = (Spectrum::Magnitude, Edge::Zeros, Log::LnAdd(1e-3));
    let mut mel = LogMel::new(FrontEnd {
        rate: RATE,
        frame,
        hop,
        fft,
        window,
        left: 160,
        span: 321,
        edge,
        spectrum,
        filters,
        log,
    })?;
    let frames = mel.frames(count);
    let mut features = vec![0.0; frames * mel.mels()];
    let mut stft = Stft::new(frame, fft, window)?;
    let mut bins = vec![0.0; stft.bins()];
    let (mut all, mut transforms) = (Duration::MAX, Duration::MAX);
    for _ in 0..TURNS {
        time(&mut all, || Ok(mel.write(clip, &mut features).map(drop)?))?;
        time(&mut transforms, || {
            for index in 0..frames {
                let start = (index * hop) as isize - 160;
                stft.write(&samples, start, edge, spectrum, &mut bins)?;
            }
            Ok(())
        })?;
    }
    println!(
        "{SECONDS} s of audio, {frames} frames of {} mels: {:.1} ms, of it transforms {:.1} ms, ratio \
         {:.2}; {:.0} times as fast as real time",
        mel.mels(),
        ms(all),
        ms(transforms),
        ms(all) / ms(transforms),
        SECONDS as f64 / all.as_secs_f64()
    );
    Ok(())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn noise() -> impl Iterator<Item = u32> {
    let step = |n: &u32| Some(n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    std::iter::successors(Some(1), step)
}
