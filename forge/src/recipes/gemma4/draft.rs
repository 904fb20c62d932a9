//! The drafting head, a checkpoint of its own (`Gemma4AssistantForCausalLM`).
//!
//! Arithmetic: `transformers`, `models/gemma4_assistant/modeling_gemma4_assistant.py`, and what feeds it,
//! `SinglePositionMultiTokenCandidateGenerator` in `generation/candidate_generator.py`: the embedding of the last
//! token, scaled, and behind it the hidden state before that token, after the target's final norm. Its layers have
//! queries alone, at the position of that token for all draft tokens of a step, and read the keys and values of the
//! target's last layers that have some, one full and one sliding. The last projection gives the hidden state for the
//! next draft token.
//!
//! With `use_ordered_embeddings` only tokens of the clusters with the best scores count. The reference computes their
//! logits alone; a graph cannot choose rows, so that it gives those of all tokens, and the host-op replaces the others.

use std::path::Path;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use serde_json::{Value, json};

use super::VERIFY;
use super::config::Config;
use super::decoder::{Drafter, Model};
use crate::chain::DRAFT_HEAD;
use crate::kit::{Decoder, Layers, MatrixFile, Reader, matrices, one_or_many};
use crate::recipe::{ContextPlan, RecipeOptions, Tables};
use crate::registry::RecipeOption;

/// Prefix of the names of its graphs.
const KEY: &str = "draft";
const CLASS: &str = "Gemma4AssistantForCausalLM";
/// The tensor that says which tokens are in which cluster.
const ORDERING: &str = "masked_embedding.token_ordering";

/// The folder of its checkpoint.
pub(super) const DRAFT: RecipeOption = RecipeOption {
    name: "draft-head",
    values: &[],
    help: "folder of the drafting head for --speculate, such as that of google/gemma-4-E2B-it-assistant (draft*); wants \
           verify, too",
};

/// Adds the graphs of the drafting head that the options name to those of the target. Where tokens are in clusters,
/// gives what the manifest says of them, and which tokens are in which.
pub(super) fn add(
    decoder: &mut Decoder,
    target: &Model<'_>,
    options: &RecipeOptions,
) -> Result<Option<(Value, Tables)>> {
    let Some(folder) = options.choice(DRAFT.name) else { return Ok(None) };
    if target.verify.is_none() {
        let what = format!(
            "recipe option {}: draft tokens are made, and nothing verifies them; expected {}, too",
            DRAFT.name, VERIFY.name
        );
        let hint = format!("--recipe-option {}=4; graphs of all layers verify", VERIFY.name);
        return Err(Error::new(ErrorKind::Usage, what).hint(hint));
    }
    let checkpoint = open(Path::new(folder), target.parts.checkpoint)?;
    let whole = Reader::whole(&checkpoint);
    if checkpoint.architecture() != Some(CLASS) {
        let found = checkpoint.architecture().unwrap_or("none");
        return Err(whole.fault(format!("architectures has {found}, expected {CLASS}")));
    }
    let config = Config::assistant(&checkpoint)?;
    let donors = donors(&whole, &config, target.config)?;
    let clusters = clusters(&checkpoint, &whole, config.vocab)?;
    let drafter = Drafter {
        backbone: target.config.hidden,
        donors,
        clusters: clusters.as_ref().map(|clusters| clusters.count),
    };
    let parts = Layers { checkpoint: &checkpoint, eps: config.eps, ..target.parts };
    let model = Model { parts, config: &config, ..*target };
    let mut graphs = Vec::new();
    for positions in [options.max_ctx].into_iter().chain(options.contexts.iter().copied()) {
        let name = match positions == options.max_ctx {
            true => KEY.to_owned(),
            false => format!("{KEY}{positions}"),
        };
        graphs.push(model.draft(&name, drafter, positions)?);
    }
    let names = graphs.iter().map(|graph| graph.name().to_owned()).collect();
    checkpoint.check_unread(&[])?;
    decoder.plan_params.insert(DRAFT_HEAD.to_owned(), one_or_many(names));
    // The head of the logits is last.
    let last = decoder.contexts.len().saturating_sub(1);
    let context = ContextPlan::new(KEY.to_owned(), options.precision, graphs).once();
    decoder.contexts.insert(last, context);
    Ok(clusters.map(|clusters| {
        let Clusters { count, top, tokens } = clusters;
        // Numbers of tokens are exact in f32: no vocabulary has 2^24 of them.
        let values: Vec<f32> = tokens.iter().map(|token| *token as f32).collect();
        let ordering = qhx_graph::weight::held(ORDERING, [count, values.len() / count], values);
        let table = MatrixFile::in_f32("ordering", "draft_ordering", ordering);
        (json!({"top_clusters": top}), matrices(DRAFT_HEAD, vec![table]))
    }))
}

/// The checkpoint of a folder, or of a target without weights its configuration.
fn open(folder: &Path, target: &Checkpoint) -> Result<Checkpoint> {
    let Some(seed) = target.seed() else { return Checkpoint::open(folder) };
    let config = folder.join("config.json");
    Checkpoint::synthetic(if folder.is_dir() { &config } else { folder }, seed)
}

/// The target's layers that full and sliding layers of the head read, once everything that has to be alike is.
fn donors(whole: &Reader<'_>, head: &Config, target: &Config) -> Result<[Option<usize>; 2]> {
    let unlike = |what: &str, found: &dyn std::fmt::Debug, expected: &dyn std::fmt::Debug| {
        whole.fault(format!(
            "{what} is {found:?}, expected {expected:?}, as the model has; the drafting head is for another model"
        ))
    };
    let sizes = [
        ("backbone_hidden_size", whole.size_or("backbone_hidden_size", 1536)?, target.hidden),
        ("text_config.vocab_size", head.vocab, target.vocab),
        ("text_config.sliding_window", head.window, target.window),
    ];
    if let Some((what, found, expected)) = sizes.iter().find(|(_, found, like)| found != like) {
        return Err(unlike(what, found, expected));
    }
    let mut donors = [None; 2];
    for (kind, name) in ["full_attention", "sliding_attention"].into_iter().enumerate() {
        let slides = kind == 1;
        if !head.sliding.contains(&slides) {
            continue;
        }
        let (own, of) = (head.heads[kind], target.heads[kind]);
        for (what, found, expected) in [
            (format!("head_dim of {name} layers"), own.dim, of.dim),
            (format!("num_key_value_heads of {name} layers"), own.groups, of.groups),
        ] {
            if found != expected {
                return Err(unlike(&what, &found, &expected));
            }
        }
        if head.ropes[kind] != target.ropes[kind] {
            let what = format!("text_config.rope_parameters.{name}");
            return Err(unlike(&what, &head.ropes[kind], &target.ropes[kind]));
        }
        donors[kind] = Some(target.last_own(slides).ok_or_else(|| {
            whole
                .fault(format!("it has {name} layers, and the model has none with keys of its own"))
        })?);
    }
    Ok(donors)
}

/// Tokens in clusters.
struct Clusters {
    count: usize,
    /// Number of clusters that count for a token.
    top: usize,
    /// The tokens of each cluster, one cluster behind the other.
    tokens: Vec<u32>,
}

/// `use_ordered_embeddings` and what goes with it.
fn clusters(checkpoint: &Checkpoint, whole: &Reader<'_>, vocab: usize) -> Result<Option<Clusters>> {
    if !whole.flag("use_ordered_embeddings")? {
        checkpoint.leave_out("masked_embedding");
        return Ok(None);
    }
    let count = whole.size_or("num_centroids", 2048)?;
    let top = whole.size_or("centroid_intermediate_top_k", 32)?;
    if !vocab.is_multiple_of(count) || top > count {
        return Err(whole.fault(format!(
            "num_centroids is {count} and centroid_intermediate_top_k {top}, expected a divisor of the {vocab} tokens, \
             and no more than that"
        )));
    }
    let tokens = checkpoint.indices(ORDERING, vocab)?;
    let mut seen = vec![false; vocab];
    for &token in &tokens {
        if std::mem::replace(&mut seen[token as usize], true) {
            return Err(Error::new(
                ErrorKind::Artifact,
                format!(
                    "{}: tensor {ORDERING} has token {token} twice, expected each of the {vocab} tokens once",
                    checkpoint.path().display()
                ),
            )
            .hint("the file is damaged, or the ordering was never filled in"));
        }
    }
    Ok(Some(Clusters { count, top, tokens }))
}
