//! `adapter_config.json`.

use std::path::Path;

use fancy_regex::Regex;
use qhx_base::{Error, ErrorKind, Result};
use serde_json::Value;

use crate::json::read_json;

/// The configuration of an adapter.
pub(crate) const CONFIG: &str = "adapter_config.json";

/// Keys that change no arithmetic of a merged model, whatever their values: training, files, and which layers have
/// tensors, which the tensors show. `fan_in_fan_out` is for GPT-2's convolutions; PEFT turns it off for linear layers.
const READ_OR_IDLE: [&str; 39] = [
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_bias",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "modules_to_save",
    "modelscope_version",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "unsloth_fixed",
    "use_dora",
    "use_rslora",
    "loftq_config",
    "corda_config",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
];
/// Keys that change a merged model in ways that are not done here, unless they have no value.
const UNDONE: [&str; 6] = [
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "trainable_token_indices",
    "target_parameters",
    "lora_bias",
];
/// Beginnings of values of `init_lora_weights` with which training starts from other base weights.
const OTHER_BASES: [&str; 4] = ["pissa", "olora", "corda", "loftq"];

/// LoRA settings that scale the change of a module.
#[derive(Debug)]
pub(super) struct Config {
    rank: usize,
    alpha: f64,
    ranks: Vec<(Regex, usize)>,
    alphas: Vec<(Regex, f64)>,
    /// Rank-stabilised (arXiv 2312.03732): over the root of the rank.
    stabilised: bool,
    pub dora: bool,
}

impl Config {
    /// Errors say what cannot be read.
    pub fn of(json: &Value) -> Result<Self, String> {
        let get = |key: &str| json.get(key).unwrap_or(&Value::Null);
        let bad = |key: &str, expected: &str| format!("{key} is {}, expected {expected}", get(key));
        if get("peft_type").as_str() != Some("LORA") {
            return Err(bad("peft_type", "\"LORA\""));
        }
        if let Some(key) = UNDONE.iter().find(|key| !is_empty(get(key))) {
            return Err(bad(key, "none"));
        }
        let all = json.as_object().into_iter().flatten();
        let unknown =
            all.filter(|(key, value)| !READ_OR_IDLE.contains(&key.as_str()) && !is_empty(value));
        if let Some((key, value)) = unknown.into_iter().next() {
            return Err(format!(
                "the key {key} ({value}) is not known, and may change the weights"
            ));
        }
        let init = get("init_lora_weights").as_str().unwrap_or_default();
        if OTHER_BASES.iter().any(|other| init.starts_with(other)) {
            return Err(bad(
                "init_lora_weights",
                "a way that leaves the base model as it is; convert the adapter to LoRA when it is saved",
            ));
        }
        let flag = |key: &str| match get(key) {
            Value::Null => Ok(false),
            value => value.as_bool().ok_or_else(|| bad(key, "true or false")),
        };
        Ok(Self {
            rank: size(get("r")).ok_or_else(|| bad("r", "a rank of at least 1"))?,
            alpha: get("lora_alpha").as_f64().ok_or_else(|| bad("lora_alpha", "a number"))?,
            ranks: patterns(get("rank_pattern"), size)
                .ok_or_else(|| bad("rank_pattern", "names and ranks"))?,
            alphas: patterns(get("alpha_pattern"), Value::as_f64)
                .ok_or_else(|| bad("alpha_pattern", "names and numbers"))?,
            stabilised: flag("use_rslora")?,
            dora: flag("use_dora")?,
        })
    }

    /// The rank of a module, and what its change is multiplied by.
    pub fn scaling(&self, module: &str) -> (usize, f32) {
        let rank = first(&self.ranks, module).unwrap_or(self.rank);
        let alpha = first(&self.alphas, module).unwrap_or(self.alpha);
        let over = if self.stabilised { (rank as f64).sqrt() } else { rank as f64 };
        (rank, (alpha / over) as f32)
    }
}

/// The value of the first pattern that fits.
fn first<T: Copy>(patterns: &[(Regex, T)], module: &str) -> Option<T> {
    let fits = |(pattern, _): &&(Regex, T)| pattern.is_match(module).unwrap_or(false);
    patterns.iter().find(fits).map(|(_, value)| *value)
}

/// Names as PEFT matches them (`get_pattern_key`): the end of a module's name, or an expression for it.
fn patterns<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<Vec<(Regex, T)>> {
    let Value::Object(all) = value else { return value.is_null().then(Vec::new) };
    let one = |(key, value): (&String, &Value)| {
        Some((Regex::new(&format!(r"^(.*\.)?({key})$")).ok()?, read(value)?))
    };
    all.iter().map(one).collect()
}

fn size(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0)
}

/// True for null, false, and what holds nothing.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty(),
        _ => false,
    }
}

/// Errors when `folder`, which is no checkpoint, is an adapter.
pub(crate) fn refuse(folder: &Path) -> Result<()> {
    let path = folder.join(CONFIG);
    if !path.is_file() {
        return Ok(());
    }
    let config = read_json(&path)?;
    let base = config.get("base_model_name_or_path").and_then(Value::as_str);
    let base = base.filter(|base| !base.is_empty()).unwrap_or("BASE");
    let folder = folder.display();
    let what = format!("{folder}: an adapter ({CONFIG}), expected the checkpoint that it changes");
    Err(Error::new(ErrorKind::Artifact, what)
        .hint(format!("forge its base with it: qhx forge {base} --lora {folder}")))
}
