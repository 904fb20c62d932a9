//! Normalised patches.

use qhx_kit::vision::{Grid, Image, Normalisation, PatchLayout, Patchify, Size};
use serde::Deserialize;

use super::{goldens, image, sha256_of_floats};

#[derive(Deserialize)]
struct Case {
    layout: String,
    frames: usize,
    seeds: Option<Vec<u32>>,
    patch: usize,
    block: usize,
    size: [u32; 2],
    mean: Option<[f64; 3]>,
    std: Option<[f64; 3]>,
    shape: [usize; 2],
    sha256: String,
    model_sha256: Option<String>,
    last: Vec<f32>,
}

#[test]
fn patches_have_the_bits_of_the_processors() {
    let cases: Vec<Case> = goldens("/patches");
    assert!(cases.iter().any(|case| case.seeds.is_some()), "different frames in a patch");
    for case in cases {
        let [width, height] = case.size;
        let seeds = case.seeds.unwrap_or(vec![width; case.frames]);
        let rgb: Vec<_> = seeds.iter().map(|&seed| image(width, height, seed)).collect();
        let frames: Vec<_> =
            rgb.iter().map(|rgb| Image::new(rgb, width, height).unwrap()).collect();
        let scale = 1.0 / 255.0;
        let normalisation = match (case.mean, case.std) {
            (Some(mean), Some(std)) => Normalisation::mean_std(mean, std, scale).unwrap(),
            _ => Normalisation::rescale(scale).unwrap(),
        };
        let layout = match case.layout.as_str() {
            "channels_first" => PatchLayout::ChannelsFirst,
            _ => PatchLayout::ChannelsLast,
        };
        let what = format!("{} {:?}", case.layout, case.size);
        let cut = Patchify::new(case.patch, case.block, layout).unwrap();
        assert_eq!(cut.patch_len(case.frames), case.shape[1], "{what}");
        let mut target = vec![f32::NAN; case.shape[0] * case.shape[1]];
        let grid = cut.write(&frames, &normalisation, &mut target).unwrap();
        assert_eq!(grid.patches(), case.shape[0], "{what}");
        assert_eq!(target[target.len() - case.last.len()..], case.last, "{what}");
        assert_eq!(sha256_of_floats(&target), case.sha256, "{what}");
        if let Some(sha256) = case.model_sha256 {
            let model = normalisation.map(|x| 2.0 * (x - 0.5)).unwrap();
            cut.write(&frames, &model, &mut target).unwrap();
            assert_eq!(sha256_of_floats(&target), sha256, "{what}, scaled by the model");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_with_both_sizes() {
    let normalisation = Normalisation::rescale(1.0 / 255.0).unwrap();
    let rgb = vec![0; 64 * 48 * 3];
    let (wide, high) = (Image::new(&rgb, 64, 48).unwrap(), Image::new(&rgb, 48, 64).unwrap());
    let cut = Patchify::new(16, 2, PatchLayout::ChannelsFirst).unwrap();
    let error = cut.write(&[wide], &normalisation, &mut []).unwrap_err();
    assert!(error.message().contains("64×48") && error.message().contains("32"), "{error}");
    let cut = Patchify::new(16, 1, PatchLayout::ChannelsFirst).unwrap();
    assert_eq!(cut.grid(wide.size()).unwrap(), Grid { rows: 3, columns: 4 });
    let error = cut.write(&[wide, high], &normalisation, &mut []).unwrap_err();
    assert!(error.message().contains("one size"), "{error}");
    let error = cut.write(&[wide], &normalisation, &mut [0.0; 9]).unwrap_err();
    assert!(error.message().contains("768") && error.message().contains('9'), "{error}");
    assert!(cut.write(&[], &normalisation, &mut []).is_err());
    for (patch, block) in [(0, 1), (1, 0), (usize::MAX, 2), (1 << 16, 2)] {
        let error = Patchify::new(patch, block, PatchLayout::ChannelsLast).unwrap_err();
        assert!(error.message().contains(&patch.to_string()), "{error}");
    }
    assert!(cut.grid(Size { width: 0, height: 16 }).is_err());
}

#[test]
fn blocks_stand_together() {
    let grid = Grid { rows: 2, columns: 4 };
    let blocks: Vec<_> = grid.order(2).unwrap().collect();
    assert_eq!(blocks, [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]);
    let plain: Vec<_> = grid.order(1).unwrap().collect();
    assert_eq!(plain, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]);
    assert_eq!(grid.blocks(2).unwrap(), Grid { rows: 1, columns: 2 });
    for block in [0, 3, usize::MAX] {
        assert!(grid.order(block).is_err(), "blocks of {block}");
    }
}
