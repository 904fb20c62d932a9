//! Adapters of PEFT (LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353), merged into a checkpoint's weights as these are
//! read: some rows at a time, in f32, before anything is quantized.

pub(crate) mod changes;
pub(crate) mod config;
mod inside;
mod merged;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use serde_json::Value;

use crate::artifact;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::tokenizer::TOKENIZER;
use config::Config;
use merged::Change;
use qhx_base::{Error, ErrorKind, Result};
use qhx_text::Tokenizer;

/// The tensors of an adapter, in the newer and in the older form.
pub(crate) const TENSORS: [&str; 2] = ["adapter_model.safetensors", "adapter_model.bin"];
pub(crate) use config::CONFIG;
/// Files of a tokenizer that trainers save beside an adapter.
pub const TEXT_FILES: [&str; 5] = [
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/default.jinja",
];
/// Beginning of the hint of an adapter that cannot be merged here.
const MERGE: &str = "merge the adapter with PEFT (merge_and_unload), and forge that folder";
/// Prefix that PEFT puts before the names of the model's modules.
const PREFIX: &str = "base_model.model.";

/// An adapter that is to be merged into a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// The folder with `adapter_config.json` and `adapter_model.safetensors`, or `adapter_model.bin`.
    pub folder: PathBuf,
    /// Factor of the adapter's change to the weights; 1 is the adapter as it was trained.
    pub weight: f32,
}

impl FromStr for Adapter {
    type Err = Error;

    /// `DIR` or `DIR=WEIGHT`.
    fn from_str(text: &str) -> Result<Self> {
        let Some((folder, weight)) = text.rsplit_once('=') else {
            return Ok(Self { folder: text.into(), weight: 1.0 });
        };
        match weight.parse::<f32>() {
            Ok(weight) if weight.is_finite() => Ok(Self { folder: folder.into(), weight }),
            // A folder may have the character in its name.
            Err(_) if Path::new(text).is_dir() => Ok(Self { folder: text.into(), weight: 1.0 }),
            _ => Err(Error::new(
                ErrorKind::Usage,
                format!("adapter {text:?}: the weight is {weight:?}, expected a number"),
            )
            .hint("give DIR or DIR=WEIGHT, such as adapter=0.5")),
        }
    }
}

impl fmt::Display for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.folder.display(), self.weight)
    }
}

/// The parts of one module's change, by the ends of their names.
#[derive(Debug, Default)]
struct Parts {
    down: Option<String>,
    up: Option<String>,
    magnitude: Option<String>,
    embedding: bool,
}

/// Role of an adapter's tensor in the module that it belongs to.
enum Part {
    Down,
    Up,
    EmbeddingDown,
    EmbeddingUp,
    Magnitude,
    /// A whole tensor of the model.
    Whole,
}

/// The name in the model, without what PEFT puts into it.
fn of(key: &str) -> (String, Part) {
    let name = key.strip_prefix(PREFIX).unwrap_or(key);
    for (end, part) in [
        (".lora_A.weight", Part::Down),
        (".lora_B.weight", Part::Up),
        (".lora_embedding_A", Part::EmbeddingDown),
        (".lora_embedding_B", Part::EmbeddingUp),
        (".lora_magnitude_vector", Part::Magnitude),
        (".lora_magnitude_vector.weight", Part::Magnitude),
    ] {
        if let Some(module) = name.strip_suffix(end) {
            return (module.to_owned(), part);
        }
    }
    (name.replace(".base_layer.", ".").replace("modules_to_save.", ""), Part::Whole)
}

/// Takes the tokenizer's files of the adapter's folder, where it has such: a vocabulary must be that of the checkpoint,
/// but for texts of special tokens, and for further tokens in rows that the model's table has.
fn take_texts(checkpoint: &mut Checkpoint, folder: &Path) -> Result<()> {
    if !TEXT_FILES.iter().any(|file| folder.join(file).is_file()) {
        return Ok(());
    }
    let path = folder.join(TOKENIZER);
    if path.is_file() {
        let own = Tokenizer::from_file(&path)?;
        let rows = checkpoint.stored("embed_tokens.weight");
        let rows = rows.and_then(|(_, shape)| shape.first().copied()).unwrap_or(usize::MAX);
        // Where the model has none, the adapter's is the only one.
        let base = checkpoint.tokenizer().ok();
        let known = |id: u32| base.as_ref().and_then(|base| base.id_to_token(id));
        let fail = |what: String| artifact(&path, what);
        let added = own.ids().filter(|id| *id as usize >= rows && known(*id).is_none()).count();
        if added > 0 {
            return Err(fail(added_tokens(added, own.vocab_size(), rows, checkpoint)).hint(MERGE));
        }
        // Trainers give reserved special tokens other texts.
        let words = base.iter().flat_map(|base| base.ids().map(|id| (id, base.visible_token(id))));
        let other = words
            .filter(|(id, token)| token.is_some() && own.id_to_token(*id) != *token)
            .min_by_key(|(id, _)| *id);
        if let Some((id, token)) = other {
            let text =
                |token: Option<String>| token.map_or("none".to_owned(), |t| format!("{t:?}"));
            let what = format!(
                "token {id} is {}, that of {} is {}",
                text(own.id_to_token(id)),
                checkpoint.path().display(),
                text(token)
            );
            return Err(fail(what).hint("the adapter is for a model of another vocabulary"));
        }
    }
    checkpoint.take_texts(folder);
    Ok(())
}

/// Says that an adapter was trained with more tokens than the checkpoint has.
fn added_tokens(added: usize, now: usize, rows: usize, checkpoint: &Checkpoint) -> String {
    let path = checkpoint.path().display();
    format!("trained with {added} added tokens: {now}, and the table of {path} has {rows} rows")
}

/// Merges an adapter into a checkpoint, and takes its tokenizer.
///
/// # Errors
/// When a file is missing or damaged, an option changes the arithmetic in a way that is not done, or tensors are for
/// another model.
pub(crate) fn merge(checkpoint: &mut Checkpoint, adapter: &Adapter) -> Result<()> {
    let folder = &adapter.folder;
    let opened = Checkpoint::open_adapter(folder)?;
    let fail = |what: String| artifact(folder, what);
    let config = Config::of(opened.config())
        .map_err(|what| fail(format!("{CONFIG}: {what}")).hint(MERGE))?;
    take_texts(checkpoint, folder)?;
    let mut modules: BTreeMap<String, Parts> = BTreeMap::new();
    let mut whole = Vec::new();
    for key in opened.keys() {
        let (name, part) = of(key);
        let parts = match part {
            Part::Whole => {
                whole.push((key.to_owned(), name));
                continue;
            }
            _ => modules.entry(name).or_default(),
        };
        parts.embedding |= matches!(part, Part::EmbeddingDown | Part::EmbeddingUp);
        let place = match part {
            Part::Up | Part::EmbeddingUp => &mut parts.up,
            Part::Magnitude => &mut parts.magnitude,
            _ => &mut parts.down,
        };
        *place = Some(key.to_owned());
    }
    let other = "the adapter is for another model, or for other layers of it";
    for (module, parts) in &modules {
        let named = format!("{module}.weight");
        let (key, shape) = checkpoint.stored(&named).ok_or_else(|| {
            fail(format!("{module} is no layer of {}", checkpoint.path().display())).hint(other)
        })?;
        let change = change(&opened, &config, module, parts, adapter.weight, &shape);
        let change = change.map_err(|e| e.context(folder.display()))?;
        checkpoint.change(key, |changes, key| changes.of.entry(key).or_default().push(change));
    }
    for (key, name) in whole {
        replace(checkpoint, &opened, adapter, &key, &name)?;
    }
    checkpoint.note_adapter(&opened, adapter);
    Ok(())
}

/// Puts a tensor that the adapter has whole in the place of the checkpoint's.
fn replace(
    checkpoint: &mut Checkpoint,
    opened: &Checkpoint,
    adapter: &Adapter,
    key: &str,
    name: &str,
) -> Result<()> {
    let fail = |what: String, hint: &str| {
        Err(artifact(&adapter.folder, format_args!("tensor {key} {what}")).hint(hint))
    };
    let Some((target, shape)) = checkpoint.stored(name) else {
        let path = checkpoint.path().display().to_string();
        return fail(
            format!("is none of {path}"),
            "biases of an adapter need a model that has them; a tied head has no tensor of its own",
        );
    };
    let found = opened.stored(key).map_or(Vec::new(), |(_, shape)| shape);
    let is_vocabulary =
        ["embed_tokens.weight", "lm_head.weight"].iter().any(|end| name.ends_with(end));
    if let (true, [now, width], [rows, same]) = (is_vocabulary, &*found, &*shape)
        && now > rows
        && width == same
    {
        return fail(format!("was {}", added_tokens(now - rows, *now, *rows, checkpoint)), MERGE);
    }
    if found != shape {
        return fail(
            format!("has the shape {found:?}, expected {shape:?}"),
            "the adapter is for another model",
        );
    }
    if adapter.weight != 1.0 {
        return fail(
            format!(
                "is whole (bias, modules_to_save), and the adapter has the weight {}",
                adapter.weight
            ),
            "give this adapter no weight, or merge it with PEFT",
        );
    }
    let tied = checkpoint.text_config().get("tie_word_embeddings") == Some(&Value::Bool(true));
    if tied
        && target.ends_with("embed_tokens.weight")
        && checkpoint.stored("lm_head.weight").is_none()
    {
        return fail(
            "is whole, and the model's head is tied to it".to_owned(),
            "PEFT keeps the old table as head; merge the adapter with PEFT",
        );
    }
    if checkpoint.changes().replaced.contains(&target)
        || checkpoint.changes().of.contains_key(&target)
    {
        return fail(
            "is changed by another adapter, too".to_owned(),
            "merge the adapters with PEFT",
        );
    }
    checkpoint.replace(opened, key, &target);
    checkpoint.change(target, |changes, key| {
        changes.replaced.insert(key);
    });
    Ok(())
}

/// The change of a module whose weight has this shape.
fn change(
    opened: &Checkpoint,
    config: &Config,
    module: &str,
    parts: &Parts,
    weight: f32,
    shape: &[usize],
) -> Result<Change> {
    let fail = |what: String| Error::new(ErrorKind::Artifact, format!("{module}: {what}"));
    let (Some(down), Some(up)) = (&parts.down, &parts.up) else {
        return Err(fail("lora_A or lora_B is missing".to_owned())
            .hint("the adapter is an incomplete download"));
    };
    let &[outputs, inputs] = shape else {
        return Err(fail(format!("its weight has the shape {shape:?}, expected a matrix"))
            .hint("adapters of convolutions are not merged; merge with PEFT"));
    };
    let (rank, scaling) = config.scaling(module);
    // Of an embedding A has the tokens and B the hidden states, so that they stand the other way around.
    let (of_down, of_up) = match parts.embedding {
        true => ([rank, outputs], [inputs, rank]),
        false => ([rank, inputs], [outputs, rank]),
    };
    for (key, expected) in [(down, of_down), (up, of_up)] {
        let found = opened.stored(key).map_or(Vec::new(), |(_, shape)| shape);
        if found != expected {
            let what = format!(
                "tensor {key} has the shape {found:?}, expected {expected:?}: rank {rank} on a weight [{outputs}, {inputs}]"
            );
            let hint = match parts.embedding {
                true => MERGE,
                false => "the adapter is for a model of other sizes",
            };
            return Err(fail(what).hint(hint));
        }
    }
    let (down, up) = (opened.floats(down, of_down)?, opened.floats(up, of_up)?);
    let (left, right) = match parts.embedding {
        true => (merged::transposed(&down, outputs), merged::transposed(&up, rank)),
        false => (up, down),
    };
    let magnitude = match &parts.magnitude {
        Some(_) if parts.embedding => {
            return Err(
                fail("DoRA of an embedding is not merged".to_owned()).hint("merge with PEFT")
            );
        }
        Some(key) => Some(Arc::from(opened.floats(key, [1, outputs])?)),
        None if config.dora => {
            return Err(fail("lora_magnitude_vector is missing, and use_dora is true".to_owned()));
        }
        None => None,
    };
    let scale = scaling * weight;
    Ok(Change {
        left: left.into(),
        right: right.into(),
        rank,
        cols: inputs,
        rows: outputs,
        scale,
        magnitude,
    })
}
