//! Colours: what a decoder gives becomes RGB of 8 bits each, where possible in place.

use image::ColorType;

use crate::Alpha;

/// Turns pixels of a decoder (16-bit values in the machine's byte order) into RGB.
///
/// - Values of 16 bits become `round(v / 257)`, so that 65535 becomes 255. (Pillow takes the upper byte of colours, and
///   clips 16-bit grey at 255, which turns most of such an image white.)
/// - Grey becomes three equal values.
/// - Transparency is laid over white, or dropped. The arithmetic of the former is that of Pillow's `alpha_composite`,
///   which `transformers` calls.
///
/// `None`: the decoder gave pixels of a type that no known decoder gives.
pub(crate) fn to_rgb(mut pixels: Vec<u8>, color: ColorType, alpha: Alpha) -> Option<Vec<u8>> {
    let color = match color {
        ColorType::L16 => to_8_bit(&mut pixels, ColorType::L8),
        ColorType::La16 => to_8_bit(&mut pixels, ColorType::La8),
        ColorType::Rgb16 => to_8_bit(&mut pixels, ColorType::Rgb8),
        ColorType::Rgba16 => to_8_bit(&mut pixels, ColorType::Rgba8),
        other => other,
    };
    match color {
        ColorType::Rgb8 => {}
        ColorType::L8 => pixels = pixels.iter().flat_map(|&v| [v; 3]).collect(),
        ColorType::La8 => {
            let grey = pixels.chunks_exact(2).map(|pixel| over(pixel[0], pixel[1], alpha));
            pixels = grey.flat_map(|v| [v; 3]).collect();
        }
        ColorType::Rgba8 => drop_alpha(&mut pixels, alpha),
        _ => return None,
    }
    pixels.shrink_to_fit();
    Some(pixels)
}

/// Halves the bytes of 16-bit values.
fn to_8_bit(pixels: &mut Vec<u8>, to: ColorType) -> ColorType {
    for i in 0..pixels.len() / 2 {
        let wide = u32::from(u16::from_ne_bytes([pixels[2 * i], pixels[2 * i + 1]]));
        // At most 255, since the value is at most 65535.
        pixels[i] = ((wide * 255 + 32_767) / 65_535) as u8;
    }
    pixels.truncate(pixels.len() / 2);
    to
}

fn drop_alpha(pixels: &mut Vec<u8>, rule: Alpha) {
    let count = pixels.len() / 4;
    for i in 0..count {
        let alpha = pixels[4 * i + 3];
        for channel in 0..3 {
            pixels[3 * i + channel] = over(pixels[4 * i + channel], alpha, rule);
        }
    }
    pixels.truncate(3 * count);
}

/// A value of a pixel with this alpha, over white.
///
/// Pillow, `AlphaComposite.c`, for a background of alpha 255: blends with seven more bits and divides by 255 with
/// shifts.
fn over(value: u8, alpha: u8, rule: Alpha) -> u8 {
    if rule == Alpha::Drop {
        return value;
    }
    let (value, alpha) = (u32::from(value), u32::from(alpha));
    let blended = (value * alpha + 255 * (255 - alpha) + 0x80) << 7;
    ((((blended >> 8) + blended) >> 8) >> 7) as u8
}
