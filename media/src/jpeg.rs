//! JPEG, decoded strictly: an image of which a part is missing is an error, not grey pixels.

use image::ColorType;
use image::metadata::Orientation;
use qhx_base::Result;
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use crate::raw::{Raw, check_size, zeroed};
use crate::scans::cut_off;
use crate::{Limits, Source};

/// Decodes a JPEG file. CMYK becomes RGB, with inverted values as Adobe's programs write them.
pub(crate) fn decode(source: &Source, bytes: &[u8], limits: &Limits) -> Result<Raw> {
    let broken = |e: zune_jpeg::errors::DecodeErrors| source.broken("JPEG", e);
    let options = DecoderOptions::default()
        .set_strict_mode(true)
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX));
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(broken)?;
    let (width, height) = decoder.dimensions().unwrap_or_default();
    let (width, height) = (width as u32, height as u32);
    check_size(source, width, height, limits)?;
    let (space, color) = match decoder.input_colorspace() {
        Some(ColorSpace::Luma) => (ColorSpace::Luma, ColorType::L8),
        _ => (ColorSpace::RGB, ColorType::Rgb8),
    };
    decoder.set_options(decoder.options().jpeg_set_out_colorspace(space));
    if let Some((there, all)) = cut_off(bytes) {
        let what = format!("its data ends after {there} of {all} blocks");
        return Err(source.broken("JPEG", what));
    }
    let len = decoder.output_buffer_size().unwrap_or(usize::MAX);
    let mut pixels = zeroed(source, len)?;
    decoder.decode_into(&mut pixels).map_err(broken)?;
    let orientation = decoder.exif().and_then(|exif| Orientation::from_exif_chunk(exif));
    Ok(Raw {
        pixels,
        color,
        width,
        height,
        orientation: orientation.unwrap_or(Orientation::NoTransforms),
    })
}
