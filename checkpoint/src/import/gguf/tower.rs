//! A vision tower in a file of its own (`mmproj`), as llama.cpp's converter writes it (`Qwen2VLVisionModel` and
//! `Qwen3VLVisionModel` of `conversion/`): tensors, and what of a `config.json` and a `processor_config.json` the
//! metadata says.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_base::artifacts::Mapped;
use qhx_base::{Error, ErrorKind, Result};
use serde_json::{Map, Value as Json, json};

use super::file::shortest;
use super::file::{File, Info};
use super::joined::Joined;
use super::{Tensor, parts};
use crate::artifact;
use crate::import::Imported;

/// A tower of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Qwen2,
    Qwen25,
    /// Tower of Qwen3-VL and of Qwen3.5.
    Qwen3,
}

/// `clip.projector_type` of those that are read.
const KINDS: [(&str, Kind); 3] = [
    ("qwen2vl_merger", Kind::Qwen2),
    ("qwen2.5vl_merger", Kind::Qwen25),
    ("qwen3vl_merger", Kind::Qwen3),
];

/// Parts of a block: llama.cpp's names, and those of Qwen2-VL, of Qwen2.5-VL and of Qwen3-VL.
const BLOCK: [(&str, [&str; 3]); 7] = [
    ("ln1", ["norm1"; 3]),
    ("ln2", ["norm2"; 3]),
    ("attn_qkv", ["attn.qkv"; 3]),
    ("attn_out", ["attn.proj"; 3]),
    ("ffn_gate", ["", "mlp.gate_proj", ""]),
    (UP, ["mlp.fc1", "mlp.up_proj", "mlp.linear_fc1"]),
    (DOWN, ["mlp.fc2", "mlp.down_proj", "mlp.linear_fc2"]),
];
/// The projections of a feed-forward. Older files of Qwen2-VL have each under the other's name.
const UP: &str = "ffn_up";
const DOWN: &str = "ffn_down";
/// The parts of which `attn.qkv` are the rows, where the file has it in parts.
const HEADS: [&str; 3] = ["attn_q", "attn_k", "attn_v"];
/// Tensors beside the blocks.
const MODEL: [(&str, [&str; 3]); 5] = [
    ("v.patch_embd", ["patch_embed.proj"; 3]),
    ("v.position_embd", ["", "", "pos_embed"]),
    ("v.post_ln", ["merger.ln_q", "merger.ln_q", "merger.norm"]),
    ("mm.0", ["merger.mlp.0", "merger.mlp.0", "merger.linear_fc1"]),
    ("mm.2", ["merger.mlp.2", "merger.mlp.2", "merger.linear_fc2"]),
];
/// Parts of a merger whose rows are added after the decoder's first layers.
const DEEPSTACK: [(&str, &str); 3] =
    [("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2")];
/// The filters of the patch embedding: a tensor for each frame of a patch.
const FILTERS: [&str; 2] = ["v.patch_embd.weight", "v.patch_embd.weight.1"];
/// Defaults of published checkpoints that no key declares: window in pixels, positions of a second, and min and max
/// area of images and of videos.
const WINDOW: usize = 112;
const TOKENS_PER_SECOND: usize = 2;
const QWEN2_PIXELS: [[u64; 2]; 2] = [[3136, 12_845_056]; 2];
const QWEN3_PIXELS: [[u64; 2]; 2] = [[65_536, 16_777_216], [4096, 25_165_824]];

/// A tower, under the names of a Hugging Face checkpoint.
#[derive(Debug)]
pub(crate) struct Tower {
    pub tensors: BTreeMap<String, Arc<dyn Imported>>,
    /// `vision_config`.
    pub config: Json,
    /// The class of the whole model, where it follows from the tower alone.
    pub class: Option<&'static str>,
    /// `processor_config.json`.
    pub processor: Json,
}

/// The one file beside the decoder's that is named as towers are: with `mmproj`. Errors when there are several.
pub(crate) fn beside(decoder: &Path) -> Result<Option<PathBuf>> {
    let folder = decoder.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let fail = |e| Error::caused(ErrorKind::Artifact, format_args!("{}", folder.display()), e);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        if name.contains("mmproj") && name.ends_with(".gguf") && path != decoder {
            found.push(path);
        }
    }
    found.sort();
    match found.as_slice() {
        [_, _, ..] => {
            let names: Vec<_> = found.iter().filter_map(|path| path.file_name()).collect();
            let names: Vec<_> = names.iter().map(|name| name.to_string_lossy()).collect();
            Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "{}: towers {} beside it, expected one",
                    decoder.display(),
                    names.join(", ")
                ),
            )
            .hint("name one of them: `--mmproj FILE`"))
        }
        _ => Ok(found.pop()),
    }
}

impl Tower {
    /// Maps the file and reads its tables.
    pub fn open(path: &Path) -> Result<Self> {
        let parts = parts::open(path)?;
        let fail = |what: String| artifact(path, what);
        let [part] = parts.as_slice() else {
            return Err(fail(format!("a tower in {} parts, expected one file", parts.len())));
        };
        let (file, map) = (&part.file, &part.map);
        let architecture = file.text("general.architecture").unwrap_or_default();
        if architecture != "clip" {
            let what = format!("llama.cpp's architecture {architecture:?}, expected \"clip\"");
            return Err(fail(what).hint("name the file of the vision tower (mmproj)"));
        }
        let named = ["clip.projector_type", "clip.vision.projector_type"]
            .iter()
            .find_map(|key| file.text(key))
            .unwrap_or_default();
        let Some((_, kind)) = KINDS.iter().find(|(name, _)| *name == named) else {
            let known: Vec<_> = KINDS.iter().map(|(name, _)| *name).collect();
            let what = format!("a tower of the kind {named:?}, expected {}", known.join(" or "));
            return Err(fail(what).hint("make the bundle from the Hugging Face checkpoint"));
        };
        let tensors = kind.tensors(file, map).map_err(fail)?;
        let config = kind.config(file).map_err(fail)?;
        let class = (*kind == Kind::Qwen2).then_some("Qwen2VLForConditionalGeneration");
        Ok(Self { tensors, config, class, processor: kind.processor(file) })
    }
}

impl Kind {
    /// Picks this kind's name from those of all kinds; none where it has no such tensor.
    fn of(self, [qwen2, qwen25, qwen3]: [&'static str; 3]) -> Option<&'static str> {
        let name = match self {
            Self::Qwen2 => qwen2,
            Self::Qwen25 => qwen25,
            Self::Qwen3 => qwen3,
        };
        Some(name).filter(|name| !name.is_empty())
    }

    /// The names of a feed-forward's projections: where the second is as wide as it should be high, they are exchanged.
    fn feed_forward(self, file: &File) -> [&'static str; 2] {
        let down = shape(file, "v.blk.0.ffn_down.weight");
        let hidden = file.size("clip.vision.embedding_length");
        match down {
            Some([outputs, inputs])
                if self == Self::Qwen2 && Some(*inputs) == hidden && outputs != inputs =>
            {
                [DOWN, UP]
            }
            _ => [UP, DOWN],
        }
    }

    /// The tensors by the names of the Hugging Face checkpoint; those that no table has keep theirs, so that they are
    /// not left out without a word.
    fn tensors(
        self,
        file: &File,
        map: &Mapped,
    ) -> Result<BTreeMap<String, Arc<dyn Imported>>, String> {
        let deepstack: BTreeSet<usize> = file.tensors.iter().filter_map(block_of_merger).collect();
        let deepstack: Vec<_> = deepstack.into_iter().collect();
        let find = |name: &str| file.tensors.iter().find(|info| info.name == name);
        let exchanged = self.feed_forward(file) == [DOWN, UP];
        let mut tensors: BTreeMap<_, Arc<dyn Imported>> = BTreeMap::new();
        for info in &file.tensors {
            let (stem, end) = info.name.rsplit_once('.').unwrap_or((&info.name, ""));
            if info.name == FILTERS[1] {
                continue;
            }
            if info.name == FILTERS[0] {
                let frames: Vec<_> = FILTERS.iter().filter_map(|name| find(name)).collect();
                let [outputs, colours, rows, columns] = *info.shape.as_slice() else {
                    let dims = info.shape.len();
                    return Err(format!("{} has {dims} dimensions, expected 4", info.name));
                };
                let shape = vec![outputs, colours, frames.len(), rows, columns];
                let joined = join(map, &frames, shape, rows * columns)?;
                tensors.insert("visual.patch_embed.proj.weight".to_owned(), joined);
                continue;
            }
            let block = stem.strip_prefix("v.blk.").and_then(|rest| rest.split_once('.'));
            let block = block.map(|(block, part)| match part {
                UP if exchanged => (block, DOWN),
                DOWN if exchanged => (block, UP),
                _ => (block, part),
            });
            if let Some((block, part)) = block
                && HEADS.contains(&part)
            {
                if part == HEADS[0] {
                    let name = |part: &str| format!("v.blk.{block}.{part}.{end}");
                    let heads: Vec<_> = HEADS.iter().filter_map(|part| find(&name(part))).collect();
                    let whole: usize = info.shape.iter().product();
                    let mut shape = info.shape.clone();
                    if heads.len() < HEADS.len() || shape.is_empty() {
                        return Err(format!(
                            "{}: expected {} beside it",
                            info.name,
                            HEADS.join(", ")
                        ));
                    }
                    shape[0] *= HEADS.len();
                    let joined = join(map, &heads, shape, whole)?;
                    tensors.insert(format!("visual.blocks.{block}.attn.qkv.{end}"), joined);
                }
                continue;
            }
            let table = |table: &[(&str, [&'static str; 3])], part: &str| {
                table
                    .iter()
                    .find(|(theirs, _)| *theirs == part)
                    .and_then(|(_, ours)| self.of(*ours))
            };
            let name = match block {
                Some((block, part)) => {
                    table(&BLOCK, part).map(|ours| format!("visual.blocks.{block}.{ours}.{end}"))
                }
                None => table(&MODEL, stem).map(|ours| format!("visual.{ours}.{end}")),
            };
            let merger = block_of_merger(info).zip(stem.rsplit_once('.'));
            let merger = merger.and_then(|(block, (_, part))| {
                let (_, part) = DEEPSTACK.iter().find(|(theirs, _)| *theirs == part)?;
                let index = deepstack.binary_search(&block).ok()?;
                Some(format!("visual.deepstack_merger_list.{index}.{part}.{end}"))
            });
            let name = name.or(merger).unwrap_or_else(|| info.name.clone());
            let tensor = Tensor::plain(map, info);
            if tensors.insert(name.clone(), Arc::new(tensor)).is_some() {
                return Err(format!("the tensor {name} is there twice"));
            }
        }
        Ok(tensors)
    }

    /// `vision_config` of the metadata, and of what published checkpoints have in common.
    fn config(self, file: &File) -> Result<Json, String> {
        let size = |key: &str| {
            let key = format!("clip.vision.{key}");
            file.size(&key).ok_or_else(|| format!("its metadata has no number {key}"))
        };
        let shape = |name: &str| shape(file, name);
        let depth = size("block_count")?;
        let frames = FILTERS.iter().filter(|name| shape(name).is_some()).count();
        let mut config = json!({
            "depth": depth,
            "num_heads": size("attention.head_count")?,
            "patch_size": size("patch_size")?,
            "spatial_merge_size": size("spatial_merge_size").unwrap_or(2),
            "temporal_patch_size": frames,
        });
        let hidden = size("embedding_length")?;
        if self == Self::Qwen2 {
            // Files of this kind have other numbers for these sizes, or 0.
            let rows = |name: &str| shape(name).and_then(|shape| shape.first().copied());
            let [up, _] = self.feed_forward(file);
            let inner = rows(&format!("v.blk.0.{up}.weight")).unwrap_or(0);
            if hidden == 0 || inner == 0 || !inner.is_multiple_of(hidden) {
                return Err(format!(
                    "feed-forwards of {inner} rows, expected a multiple of {hidden}, clip.vision.embedding_length"
                ));
            }
            config["embed_dim"] = json!(hidden);
            config["mlp_ratio"] = json!(inner / hidden);
            config["hidden_size"] = json!(rows("mm.2.weight"));
            config["hidden_act"] = json!("quick_gelu");
            return Ok(config);
        }
        config["hidden_size"] = json!(hidden);
        config["intermediate_size"] = json!(size("feed_forward_length")?);
        config["out_hidden_size"] = json!(size("projection_dim")?);
        match self {
            Self::Qwen2 => {}
            Self::Qwen25 => {
                let every = size("n_wa_pattern")?.max(1);
                let full: Vec<_> = (1..=depth / every).map(|nth| nth * every - 1).collect();
                config["hidden_act"] = json!("silu");
                config["fullatt_block_indexes"] = json!(full);
                config["window_size"] = json!(size("window_size").unwrap_or(WINDOW));
                config["tokens_per_second"] = json!(TOKENS_PER_SECOND);
            }
            Self::Qwen3 => {
                let flags = file.list("clip.vision.is_deepstack_layers").iter().enumerate();
                let layers = flags.filter(|(_, flag)| **flag != 0.0).map(|(index, _)| index);
                let positions = shape("v.position_embd.weight").and_then(|shape| shape.first());
                config["hidden_act"] = json!("gelu_pytorch_tanh");
                config["deepstack_visual_indexes"] = json!(layers.collect::<Vec<_>>());
                config["num_position_embeddings"] = json!(positions);
            }
        }
        Ok(config)
    }

    /// `processor_config.json` of the metadata, and of what published checkpoints have in common.
    fn processor(self, file: &File) -> Json {
        let numbers = |key: &str| {
            let list: Vec<_> = file.list(key).iter().map(|n| shortest(*n)).collect();
            (!list.is_empty()).then_some(list)
        };
        let mut common = Map::new();
        for key in ["image_mean", "image_std"] {
            common.insert(key.to_owned(), json!(numbers(&format!("clip.vision.{key}"))));
        }
        let [image, video] = match self {
            Self::Qwen2 | Self::Qwen25 => QWEN2_PIXELS,
            Self::Qwen3 => QWEN3_PIXELS,
        };
        let limit = |key: &str, default: u64| {
            file.size(&format!("clip.vision.image_{key}")).map_or(default, |size| size as u64)
        };
        let image = [limit("min_pixels", image[0]), limit("max_pixels", image[1])];
        let part = |[min, max]: [u64; 2]| {
            let mut part = common.clone();
            part.insert("min_pixels".to_owned(), json!(min));
            part.insert("max_pixels".to_owned(), json!(max));
            part
        };
        json!({"image_processor": part(image), "video_processor": part(video)})
    }
}

/// Shape of the tensor of this name.
fn shape<'a>(file: &'a File, name: &str) -> Option<&'a [usize]> {
    file.tensors.iter().find(|info| info.name == name).map(|info| &*info.shape)
}

/// Tensors of one shape that are one, of which each has `unit` elements in turn.
fn join(
    map: &Mapped,
    infos: &[&Info],
    shape: Vec<usize>,
    unit: usize,
) -> Result<Arc<Joined>, String> {
    if let Some(other) = infos.iter().find(|info| info.shape != infos[0].shape) {
        return Err(format!(
            "{} has the shape {:?}, expected {:?} as {}",
            other.name, other.shape, infos[0].shape, infos[0].name
        ));
    }
    let parts = infos.iter().map(|info| Tensor::plain(map, info)).collect();
    Ok(Arc::new(Joined::new(parts, shape, unit)))
}

/// The block after which the merger that a tensor belongs to takes rows.
fn block_of_merger(info: &Info) -> Option<usize> {
    let (block, _) = info.name.strip_prefix("v.deepstack.")?.split_once('.')?;
    block.parse().ok()
}
