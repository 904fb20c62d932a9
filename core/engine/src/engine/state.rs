//! Consumed state of a session, as bytes that another process goes on from.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | [`MAGIC`] |
//! | 4 | version, little-endian |
//! | 8 | length of the description, little-endian |
//! | that many | [`Description`], as JSON |
//! | the next | the states of the op, one behind the other |
//! | 32 | SHA-256 of all before |
//!
//! The last state is that of all positions. Those before it are the snapshots that the conversation's next turn may
//! return to.

use qhx_base::{Error, ErrorKind, Result, artifacts::Artifacts, error};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::Model;
use super::sequence::Sequence;
use crate::manifest::Manifest;
use crate::op::HostOp as _;

const MAGIC: [u8; 8] = *b"qhxstate";
const VERSION: u32 = 1;
/// Offset of the description.
const HEAD: usize = 20;
/// Bytes of the hash at the end.
const HASH: usize = 32;
/// Bytes that are hashed at each of the places of a file whose hash is not known.
const SAMPLE: usize = 4096;
const SAMPLES: usize = 64;

/// Description of the bytes.
#[derive(Debug, Serialize, Deserialize)]
struct Description {
    op: String,
    /// See [`fingerprint`].
    bundle: String,
    sequence: Sequence,
    states: Vec<State>,
}

/// A state of the op.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct State {
    position: usize,
    bytes: usize,
}

impl Model {
    /// The consumed state, as bytes: for [`Model::import_state`] in this process or in another one. They hold tokens
    /// and caches, and with them what was said: keep them as private as the conversation. Their length is that of the
    /// used rows of the caches: for 1,000 positions of a model with 1B parameters, some 30 MB.
    ///
    /// # Errors
    /// When the host-op is of a plugin that cannot export its state, or they do not fit the memory.
    pub fn export_state(&mut self) -> Result<Vec<u8>> {
        self.settle();
        let snapshots = self.prefix.snapshots();
        let mut exported = Vec::with_capacity(snapshots.len() + 1);
        let kept = self.prefix.kept_before(self.op.info());
        exported.extend(kept.iter().map(|state| (state.sequence.len(), Ok(state.bytes.to_vec()))));
        if !snapshots.is_empty() {
            let now = self.op.snapshot()?;
            for (position, id) in snapshots {
                self.op.restore(id)?;
                exported.push((position, self.op.export_state()));
            }
            let back = self.op.restore(now);
            self.op.drop_snapshot(now);
            back?;
            exported.sort_by_key(|(position, _)| *position);
        }
        exported.push((self.op.position(), self.op.export_state()));
        let mut states = Vec::with_capacity(exported.len());
        let mut parts = Vec::with_capacity(exported.len());
        for (position, bytes) in exported {
            let bytes = bytes?;
            states.push(State { position, bytes: bytes.len() });
            parts.push(bytes);
        }
        let description = serde_json::to_vec(&Description {
            op: self.op().description.name.clone(),
            bundle: self.bundle.fingerprint()?,
            sequence: self.prefix.sequence().clone(),
            states,
        })
        .map_err(|e| Error::caused(ErrorKind::Internal, "the description of a state", e))?;
        let length = HEAD + description.len() + parts.iter().map(Vec::len).sum::<usize>() + HASH;
        let mut out = Vec::new();
        out.try_reserve_exact(length).map_err(|e| {
            let what = format_args!("a state of {length} bytes does not fit the memory");
            Error::caused(ErrorKind::Internal, what, e)
        })?;
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&(description.len() as u64).to_le_bytes());
        out.extend_from_slice(&description);
        parts.iter().for_each(|part| out.extend_from_slice(part));
        let hash = Sha256::digest(&out);
        out.extend_from_slice(&hash);
        Ok(out)
    }

    /// Goes on from what [`Model::export_state`] gave, of this bundle on any backend. What was consumed here is
    /// forgotten, but for a failure: then it is as before, or empty where the host-op failed. The state, and what goes
    /// on from it, is not [kept](super::ModelOptions::keep_states) for other sessions: nobody knows whether such bytes
    /// are of the tokens that they name.
    ///
    /// # Errors
    /// When the bytes are cut short or damaged, of another bundle or of a newer version.
    pub fn import_state(&mut self, bytes: &[u8]) -> Result<()> {
        let (description, parts) = self.read_state(bytes)?;
        let Description { sequence, states, .. } = description;
        self.reset()?;
        let imported = self.import_parts(&sequence, &states, &parts);
        if imported.is_err() {
            // It fails where the op is closed, which has nothing to forget.
            let _ = self.reset();
        }
        imported
    }

    fn import_parts(
        &mut self,
        sequence: &Sequence,
        states: &[State],
        parts: &[&[u8]],
    ) -> Result<()> {
        for (index, (state, part)) in states.iter().zip(parts).enumerate() {
            self.op
                .import_state(state.position, part)
                .map_err(|e| e.context(format_args!("state {} of {}", index + 1, states.len())))?;
            let mut consumed = sequence.clone();
            consumed.truncate(state.position);
            self.prefix.imported(consumed);
            if index + 1 < states.len() {
                self.prefix.checkpoint(&mut self.op)?;
            }
        }
        Ok(())
    }

    /// Checks bytes before anything is forgotten. Returns the description, and the states of the op.
    fn read_state<'b>(&self, bytes: &'b [u8]) -> Result<(Description, Vec<&'b [u8]>)> {
        let invalid = |why: String| error!(Usage, "the state cannot be imported: {why}");
        let cut = || invalid(format!("it is cut short: {} bytes", bytes.len()));
        let (magic, rest) = bytes.split_first_chunk::<8>().ok_or_else(cut)?;
        if *magic != MAGIC {
            return Err(invalid("it is none: it does not begin with \"qhxstate\"".into()));
        }
        let (version, rest) = rest.split_first_chunk().ok_or_else(cut)?;
        let version = u32::from_le_bytes(*version);
        if version != VERSION {
            let why = format!("it is of version {version}, expected {VERSION}");
            return Err(invalid(why).hint("update qhx, or begin the conversation again"));
        }
        let (length, rest) = rest.split_first_chunk().ok_or_else(cut)?;
        let (whole, hash) = bytes.split_last_chunk::<HASH>().ok_or_else(cut)?;
        if Sha256::digest(whole)[..] != hash[..] {
            return Err(invalid("it is cut short or damaged: its hash is another one".into()));
        }
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let rest = rest.get(..rest.len().saturating_sub(HASH)).unwrap_or_default();
        let (description, mut rest) = rest.split_at_checked(length).ok_or_else(cut)?;
        let description: Description = serde_json::from_slice(description)
            .map_err(|e| invalid(format!("its description: {e}")))?;
        let Description { op, bundle, sequence, states } = &description;
        let name = &self.op().description.name;
        if op != name {
            return Err(invalid(format!("it is of host-op {op:?}, expected {name:?}")));
        }
        let expected = self.bundle.fingerprint()?;
        if *bundle != expected {
            let why = format!(
                "it is of another bundle than {}: found {bundle}, expected {expected}",
                self.manifest().path.display()
            );
            return Err(
                invalid(why).hint("a state fits the bundle that it was saved with, files and all")
            );
        }
        sequence.check().map_err(invalid)?;
        let mut parts = Vec::with_capacity(states.len().min(rest.len()));
        let mut least = 0;
        for state in states {
            let (part, behind) = rest.split_at_checked(state.bytes).ok_or_else(cut)?;
            if state.position < least || state.position > sequence.len() {
                return Err(invalid(format!("its states are at {states:?}")));
            }
            least = state.position;
            parts.push(part);
            rest = behind;
        }
        if least != sequence.len() || states.is_empty() || !rest.is_empty() {
            return Err(invalid(format!(
                "its states are at {states:?}, expected the last at {} and {} bytes fewer",
                sequence.len(),
                rest.len()
            )));
        }
        let max_ctx = self.info().max_ctx;
        if max_ctx > 0 && sequence.len() > max_ctx {
            return Err(invalid(format!(
                "it has {} positions, but the context {max_ctx}",
                sequence.len()
            )));
        }
        Ok((description, parts))
    }
}

/// Fingerprint that tells bundles apart whose states are not each other's: SHA-256 of what the manifest says of the
/// model and its plan, and of its files' hashes. A file without one counts by its length and samples of its bytes.
/// Texts do not count: tokenizer and chat template may change.
pub(super) fn fingerprint(manifest: &Manifest, artifacts: &Artifacts) -> Result<String> {
    let table = &manifest.artifacts;
    let mut hash = Sha256::new();
    let mut add = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    for key in ["/params", "/plan", "/artifacts/contexts", "/artifacts/embed"] {
        add(manifest.raw.pointer(key).map_or(String::new(), ToString::to_string).as_bytes());
    }
    let texts = [&table.tokenizer, &table.tokenizer_config, &table.golden];
    let is_text = |path: &str| texts.iter().any(|text| text.as_deref() == Some(path));
    let contexts = table
        .contexts
        .iter()
        .flat_map(|context| context.bin.iter().chain(context.onnx.iter().map(|(_, file)| file)));
    let named = contexts.chain(table.embed.iter().map(|embed| &embed.path));
    let paths: std::collections::BTreeSet<_> =
        table.files.keys().chain(named).filter(|path| !is_text(path)).collect();
    for path in paths {
        add(path.as_bytes());
        if let Some(known) = table.files.get(path).and_then(|file| file.sha256.as_ref()) {
            add(known.as_bytes());
            continue;
        }
        // One that is not there is of an optional set, or of another backend.
        if !artifacts.root().join(path).exists() {
            continue;
        }
        let file = artifacts.clone().open("/artifacts", path)?;
        let bytes = file.bytes();
        add(&(bytes.len() as u64).to_le_bytes());
        for sample in 0..SAMPLES {
            let start = (bytes.len() / SAMPLES).saturating_mul(sample);
            add(bytes.get(start..bytes.len().min(start + SAMPLE)).unwrap_or_default());
        }
    }
    Ok(qhx_base::hash::hex(hash.finalize()))
}
