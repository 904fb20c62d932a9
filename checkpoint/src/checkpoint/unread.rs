//! Which tensors of a checkpoint a recipe reads, and which it leaves out by name. What it does neither with is an
//! error: a bundle without a bias, a norm or a layer computes, and computes something else.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;

use qhx_base::{Error, ErrorKind, Result};

use super::{Checkpoint, MAX_VALUES};

/// Buffers of older checkpoints, which follow from the configuration.
const BUFFERS: [&str; 1] = [".rotary_emb.inv_freq"];
/// Groups of names that a message lists.
const LISTED: usize = 8;

/// Tensors that recipes read or leave out; clones of a checkpoint share them.
#[derive(Debug, Default)]
pub(super) struct Uses {
    read: BTreeSet<String>,
    /// Names, or what they begin with before a dot.
    left_out: BTreeSet<String>,
}

impl Checkpoint {
    /// Leaves out the tensor `part`, given without the decoder's prefix, and all below it: `mtp`, `visual`,
    /// `layers.20.self_attn.k_proj`. A recipe calls this for what the bundle does without; any other tensor that it
    /// does not read is an error when the bundle is planned.
    pub fn leave_out(&self, part: &str) {
        let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        uses.left_out.extend((self.names)(part));
    }

    /// Notes that a recipe reads the tensor `key`.
    pub(crate) fn reads(&self, key: &str) {
        let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        uses.read.insert(key.to_owned());
    }

    /// The same checkpoint, of which no recipe has read anything.
    pub fn unused(&self) -> Self {
        Self { uses: Default::default(), ..self.clone() }
    }

    /// The tensors that are left out. Errors when there are tensors that recipes neither read nor
    /// [leave out](Self::leave_out), unless one of `ignored` covers them or they are biases of zeros.
    pub fn check_unread(&self, ignored: &[String]) -> Result<Vec<String>> {
        let uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        let left_out = |name: &str| {
            let ends = name.char_indices().filter(|(_, c)| *c == '.').map(|(at, _)| at);
            let mut starts = ends.chain([name.len()]).filter_map(|end| name.get(..end));
            starts.any(|start| uses.left_out.contains(start))
                || BUFFERS.iter().any(|buffer| name.ends_with(buffer))
                || ignored.iter().any(|part| covers(part, name))
        };
        let unread = self.tensors.keys().filter(|name| !uses.read.contains(*name));
        let (known, unknown): (Vec<_>, Vec<_>) =
            unread.cloned().partition(|name| left_out(name) || self.is_zero_bias(name));
        let Some(first) = unknown.first() else { return Ok(known) };
        let what = format!(
            "{}: no graph and no table of the bundle reads {} of the checkpoint's {} tensors: {}",
            self.path.display(),
            unknown.len(),
            self.tensors.len(),
            summary(&unknown)
        );
        Err(Error::new(ErrorKind::Artifact, what).hint(format!(
            "config.json describes another model (fewer layers; biases want attention_bias or mlp_bias: true), or the \
             recipe forgets them; a bundle without them is made with `--ignore-tensors {first}`"
        )))
    }

    /// True for a bias that changes nothing: some programs write one for each linear layer.
    fn is_zero_bias(&self, name: &str) -> bool {
        let Some(entry) = self.tensors.get(name).filter(|_| name.ends_with(".bias")) else {
            return false;
        };
        let len = entry.shape().iter().try_fold(1usize, |n, size| n.checked_mul(*size));
        let Some(len) = len.filter(|len| *len <= MAX_VALUES) else { return false };
        let mut values = vec![f32::NAN; len];
        let read = self.view(name, entry, [1, len]).and_then(|m| m.read_f32(0, &mut values));
        read.is_ok() && values.iter().all(|value| *value == 0.0)
    }
}

/// Names in groups of those that differ in numbers alone: `model.layers.*.mlp.up_proj.bias (28)`.
pub fn summary(names: &[String]) -> String {
    let mut groups: BTreeMap<String, usize> = BTreeMap::new();
    for name in names {
        let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        let parts = name.split('.').map(|part| if number(part) { "*" } else { part });
        *groups.entry(parts.collect::<Vec<_>>().join(".")).or_default() += 1;
    }
    let more = groups.len().saturating_sub(LISTED);
    let groups = groups.into_iter().take(LISTED);
    let mut listed: Vec<_> = groups
        .map(|(name, count)| if count == 1 { name } else { format!("{name} ({count})") })
        .collect();
    if more > 0 {
        listed.push(format!("{more} more kinds"));
    }
    listed.join(", ")
}

/// True where the words of `part` stand in a tensor's name, one after the other.
pub fn covers(part: &str, tensor: &str) -> bool {
    format!(".{tensor}.").contains(&format!(".{part}."))
}
