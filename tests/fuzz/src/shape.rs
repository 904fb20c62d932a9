//! Images and audio clips as a host-op shapes them. A file begins with numbers of four bytes each, which are taken for
//! sizes and rules; what follows them is pixels or samples.

use qhx_base::{Error, ErrorKind, Result};
use qhx_kit::audio::{
    Clip, Edge, FrontEnd, Log, LogMel, MelOptions, MelScale, Spectrum, Window, pieces,
};
use qhx_kit::vision::{
    AxialOrder, Filter, Image, Normalisation, PatchLayout, Patchify, Resizer, Size,
    aspect_ratio_preserving_size, axial_rope, pool_mean, resample_positions, smart_resize,
};

/// Pixels of images, patches and tables, and numbers of features, that a file may ask for.
const MOST: usize = 1 << 20;

/// Target sizes, resizing, patches, positions and pooling.
pub(crate) fn patches(data: &[u8]) -> Result<()> {
    let mut numbers = Numbers(data);
    let [width, height, patch, block, max_patches, min_pixels, max_pixels] =
        std::array::from_fn(|_| numbers.u32());
    let [side, table_width, head_dim] = std::array::from_fn(|_| numbers.u32() as usize);
    let [theta, scale] = std::array::from_fn(|_| numbers.f64());
    let (mean, std) =
        (std::array::from_fn(|_| numbers.f64()), std::array::from_fn(|_| numbers.f64()));
    let pixels = numbers.0;
    let size = Size { width, height };
    // A file of a few bytes may be a large image, or the pixels are what they are: too few, most often.
    let few = usize::try_from(size.area()).is_ok_and(|area| area <= MOST / 16);
    let rgb: Vec<u8> = match pixels {
        [] => Vec::new(),
        _ if few => pixels.iter().copied().cycle().take(size.area() as usize * 3).collect(),
        _ => pixels.to_vec(),
    };
    let fixed = Image::new(&rgb, width, height).map_err(refused)?;
    let unit = patch.saturating_mul(block);
    let smart = smart_resize(size, unit, min_pixels.into(), max_pixels.into()).map_err(refused)?;
    let budget = aspect_ratio_preserving_size(size, patch, block, max_patches).map_err(refused)?;
    let normalisation = Normalisation::mean_std(mean, std, scale).map_err(refused)?;
    let (patch, block) = (patch as usize, block as usize);
    let mut resizer = Resizer::new(Filter::Bicubic);
    for (to, layout) in [(smart, PatchLayout::ChannelsFirst), (budget, PatchLayout::ChannelsLast)] {
        let multiple = to.width.is_multiple_of(unit) && to.height.is_multiple_of(unit);
        assert!(multiple && to.area() > 0, "{size} becomes {to}, which is no multiple of {unit}");
        if to.area() > MOST as u64 {
            return Err(Error::new(ErrorKind::Internal, "more pixels than are tried"));
        }
        let image = resizer.resize(fixed, to).map_err(refused)?;
        let cut = Patchify::new(patch, block, layout).map_err(refused)?;
        let grid = cut.grid(to).map_err(refused)?;
        let mut rows = vec![f32::NAN; grid.patches() * cut.patch_len(1)];
        cut.write(&[image], &normalisation, &mut rows).map_err(refused)?;
        assert!(rows.iter().all(|value| value.is_finite()), "a place that no pixel went to");
        let row = rows.len() / grid.patches();
        let mut pooled = vec![0.0; rows.len() / (block * block)];
        pool_mean(&rows, row, grid, block, &mut pooled).map_err(refused)?;
        let room = |width: usize| {
            grid.patches().checked_mul(width).filter(|&len| len <= MOST).unwrap_or(0)
        };
        let table = vec![0.5; side.saturating_mul(side).saturating_mul(table_width).min(MOST)];
        let mut target = vec![0.0; room(table_width)];
        resample_positions(&table, side, table_width, grid, block, &mut target).map_err(refused)?;
        let (mut cos, mut sin) = (vec![0.0; room(head_dim / 2)], vec![0.0; room(head_dim / 2)]);
        let order = AxialOrder::RowsColumns;
        axial_rope(grid, block, order, head_dim, theta, &mut cos, &mut sin).map_err(refused)?;
    }
    Ok(())
}

/// Log-mel features of a clip in pieces.
pub(crate) fn log_mel(data: &[u8]) -> Result<()> {
    let mut numbers = Numbers(data);
    let rate = numbers.u32();
    let [piece, overlap, frame, hop, fft, left, span, mels] =
        std::array::from_fn(|_| numbers.u32() as usize);
    let [min_hz, max_hz] = std::array::from_fn(|_| numbers.f64());
    let small = numbers.f64() as f32;
    let rules = numbers.u32();
    let set = |bit: u32| rules >> bit & 1 == 1;
    let scale = if set(0) { MelScale::Htk } else { MelScale::Slaney };
    let front = FrontEnd {
        rate,
        frame,
        hop,
        fft,
        window: if set(1) { Window::PeriodicHann } else { Window::SymmetricHann },
        left,
        span,
        edge: if set(2) { Edge::Zeros } else { Edge::Reflect },
        spectrum: if set(3) { Spectrum::Magnitude } else { Spectrum::Power },
        filters: MelOptions { mels, min_hz, max_hz, scale, area_norm: set(4) },
        log: if set(5) { Log::LnAdd(small) } else { Log::Log10Max(small) },
    };
    let samples: Vec<f32> =
        numbers.0.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let clip = Clip::new(&samples, rate, rate).map_err(refused)?;
    let mut mel = LogMel::new(front).map_err(refused)?;
    // Each piece takes a while: a few show what many would.
    for range in pieces(samples.len(), piece, overlap).map_err(refused)?.take(16) {
        let Some(part) = clip.part(range) else {
            return Err(Error::new(ErrorKind::Internal, "a piece of no samples"));
        };
        let len = (mel.frames(part.samples().len()) + 1)
            .checked_mul(mel.mels())
            .filter(|&len| len <= MOST);
        let len =
            len.ok_or_else(|| Error::new(ErrorKind::Internal, "more features than are tried"))?;
        let mut target = vec![f32::NAN; len];
        mel.write(part, &mut target).map_err(refused)?;
        assert!(target.iter().all(|value| value.is_finite()), "features of finite samples");
    }
    Ok(())
}

/// Little-endian numbers of four bytes; 0 after the last.
struct Numbers<'a>(&'a [u8]);

impl Numbers<'_> {
    fn bytes(&mut self) -> [u8; 4] {
        let (bytes, rest) = self.0.split_first_chunk().unwrap_or((&[0; 4], &[]));
        self.0 = rest;
        *bytes
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    fn f64(&mut self) -> f64 {
        f32::from_le_bytes(self.bytes()).into()
    }
}

fn refused(error: qhx_op::Error) -> Error {
    Error::new(ErrorKind::Prompt, error.message())
}
