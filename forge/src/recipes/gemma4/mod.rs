//! The recipe for Gemma 4 (`Gemma4ForCausalLM`, `Gemma4ForConditionalGeneration`; E2B and E4B), and for text of Gemma
//! 3n (`Gemma3nForCausalLM`, `Gemma3nForConditionalGeneration`), whose layers have several streams: see `altup.rs`.
//!
//! Arithmetic: `transformers`, `models/gemma4/modeling_gemma4.py`. Graphs `decode` take one token, graphs
//! `prefill<P>` take P tokens of a prompt over the same caches; the head is a graph of its own.
//!
//! | tensor | shape, P = 1 for `decode` | |
//! |---|---|---|
//! | `x` → `y` | `[P, hidden]` | embedding rows times `params.embed_scale` in; normalised rows out |
//! | `ple` | `[P, layers · width]` | per-layer inputs of the graph's layers |
//! | `cos_f`, `sin_f`; `cos_s`, `sin_s` | `[P, head_dim / 2]` | half tables of full and of sliding layers |
//! | `cmask_f`; `cmask_s` | `[P, rows + P]` | added to scores; the last P slots are the graph's own tokens |
//! | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[kv_heads, rows, head_dim]` → `[kv_heads, P, head_dim]` | keys after norm and rope, values after their norm |
//! | `ple<P>`: `x` → `context` | `[P, hidden]` → `[P, layers · width]` | the projection of `x`, for the layers that a step of P tokens takes |
//! | `row_k_i`, `row_v_i` | `[kv_heads, 1, head_dim]` | what a donor in an earlier graph gave for the token |
//! | head: `x` → `logits` | `[1, hidden]` → `[1, vocab]` | before the softcap |
//! | `draft`: `x`, `h` → `y`, `logits`, `centroids` | `[1, hidden]`, … → `[1, hidden]`, `[1, vocab]`, `[1, clusters]` | the drafting head, see `draft.rs` |
//!
//! `rows` is `max_ctx` for full layers, in graphs of a smaller context its positions. For sliding ones it is the
//! window, or P of the widest graph where that is more, and the host keeps the cache as a ring.
//!
//! The last layers have no keys of their own: they read those of a donor, the last layer of their kind that has some.
//! They write no cache, so only the last token of a prompt passes them, and graphs `prefill<P>` end before them: with
//! the keys and values of the last layer that has some, and without `y`. The option `verify` makes graphs of all
//! layers, which give `y` of every row: a draft token is verified by its logits.

mod altup;
mod audio;
mod config;
mod decoder;
mod draft;
mod towers;
mod vision;

use serde_json::{Map, Value, json};

use crate::chain::DRAFT_HEAD;
use crate::kit::{
    Decoder, DecoderParams, Layers, MatrixFile, PREFILL_ROWS, Reader, VISION_WEIGHTS, check_shape,
    decoder_of, matrices, object, one_or_many, prefill_rows,
};
use crate::recipe::{ContextPlan, Precision, Recipe, RecipeOptions, Tables};
use crate::register_recipe;
use crate::registry::{RecipeEntry, RecipeOption};
use crate::text::has_chat_template;
use audio::{AUDIO_TOKENS, Audio};
use config::{Config, Rope};
use decoder::Model;
use draft::DRAFT;
use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::graph::Graph;
use vision::{IMAGE_PATCHES, IMAGE_TOKENS, Vision};

/// Contexts of the decoder by default, as published.
const PARTS: usize = 3;

/// Requests for a transcription: the text behind which a base model continues with it, and a message.
const COMPLETION: &str = "\nTranscription: ";
const REQUEST: &str = "Transcribe the following speech segment in its original language. Only output the transcription, \
                       with no newlines.";

/// Which of the towers become graphs.
const TOWERS: RecipeOption = RecipeOption {
    name: "towers",
    values: &["all", "none", "vision", "audio"],
    help: "the towers of the checkpoint that the bundle has: for images (vision), for audio (audio)",
};
const DOWN_SHIFT: RecipeOption = RecipeOption {
    name: "down-shift",
    values: &["4", "0", "2", "6", "8"],
    help: "inputs of an MLP's down projection are divided by 2 to this power; the norm behind it takes that back",
};
const PROJECTION: RecipeOption = RecipeOption {
    name: "ple",
    values: &["graph", "host"],
    help: "what projects rows to per-layer inputs: graphs, or the host, as in published bundles",
};
const VERIFY: RecipeOption = RecipeOption {
    name: "verify",
    values: &["none", "4", "8", "16"],
    help: "draft tokens that a graph of all layers verifies at once (--speculate)",
};
const AUDIO_WEIGHTS: RecipeOption = RecipeOption {
    name: "audio",
    values: &["fp16", "w8a16"],
    help: "precision of the audio tower's weights",
};

register_recipe!(
    RecipeEntry::new(&["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .shards(PARTS)
        .options(&[
            TOWERS,
            IMAGE_PATCHES,
            IMAGE_TOKENS,
            AUDIO_TOKENS,
            DOWN_SHIFT,
            PROJECTION,
            VERIFY,
            DRAFT,
            AUDIO_WEIGHTS,
            VISION_WEIGHTS,
        ])
);

register_recipe!(
    RecipeEntry::new(&["Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .shards(PARTS)
        .options(&[DOWN_SHIFT, PROJECTION, VERIFY])
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let streams = checkpoint.architecture().is_some_and(|name| name.starts_with("Gemma3n"));
    let config = if streams { Config::gemma3n(checkpoint)? } else { Config::read(checkpoint)? };
    let max_ctx = options.max_ctx;
    check_shape(options, config.layers(), Some(config.max_positions))?;
    let verify = options.choice(VERIFY.name).and_then(|rows| rows.parse().ok());
    let prompts = step_rows(options, verify)?;
    let window = config.window.min(max_ctx);
    // A step writes all of its rows into the ring at once.
    let ring = prompts.iter().fold(window, |ring, rows| ring.max(*rows));
    let parts = Layers::decoder(checkpoint, options, config.eps);
    let model = Model {
        parts,
        config: &config,
        ring,
        down_shift: DOWN_SHIFT.choice(options).and_then(|k| k.parse().ok()).unwrap_or(0),
        verify,
    };
    let mut decoder = decoder_of(
        options,
        &config.parts(options.shards),
        &prompts,
        |name, range, step| {
            let skipped = model.only_fills(step.rows) && range.start >= config.first_shared();
            (!skipped).then(|| model.graph(name, range, step)).transpose()
        },
        parts.lmhead(config.hidden, config.vocab, config.tied, None)?,
    )?;
    let drafts = draft::add(&mut decoder, &model, options)?;
    let Decoder { mut contexts, mut plan_params } = decoder;
    let projects = options.choice(PROJECTION.name) != Some("host");
    if projects {
        let mut graphs = Vec::new();
        for rows in [1].into_iter().chain(prompts.iter().copied()) {
            let name = if rows == 1 { "ple".to_owned() } else { format!("ple{rows}") };
            let layers =
                if model.only_fills(rows) { config.attending_prompts() } else { config.layers() };
            if layers == 0 {
                continue;
            }
            graphs.push(model.projection(&name, rows, layers)?);
        }
        let names = graphs.iter().map(|graph| graph.name().to_owned()).collect();
        plan_params.insert("ple".to_owned(), one_or_many(names));
        contexts.push(ContextPlan::new("ple".to_owned(), options.precision, graphs));
    }
    let mut params = params(&config, max_ctx, window);
    let mut tables = vec![per_layer_tables(checkpoint, &config, options.precision, projects)?];
    if let Some((clusters, table)) = drafts {
        params.insert(DRAFT_HEAD.to_owned(), clusters);
        tables.push(table);
    }
    // Layers that read a donor's keys and values have some of their own in published checkpoints, too.
    for layer in config.first_shared()..config.layers() {
        for part in ["k_proj", "v_proj", "k_norm", "v_norm"] {
            checkpoint.leave_out(&format!("layers.{layer}.self_attn.{part}"));
        }
    }
    let mut add = |key: &str, precision: Precision, graphs: Vec<Graph>| {
        let names = graphs.iter().map(|graph| graph.name().to_owned()).collect();
        plan_params.insert(key.to_owned(), one_or_many(names));
        let context = ContextPlan::new(key.to_owned(), precision, graphs);
        contexts.push(ContextPlan { optional: Some(key.to_owned()), ..context });
    };
    if !streams && wants(checkpoint, options, "vision") {
        let vision = Vision::read(checkpoint, options)?;
        let precision = VISION_WEIGHTS.precision(options);
        add("vision", precision, vision.graphs(checkpoint, precision)?);
        tables.push(vision.tables(checkpoint, config.hidden)?);
        let mut keys = vision.params();
        keys.extend(tokens(checkpoint, ["image_token_id", "boi_token_id", "eoi_token_id"])?);
        params.insert("vision".to_owned(), Value::Object(keys));
    } else {
        checkpoint.leave_out("vision_tower");
        checkpoint.leave_out("embed_vision");
    }
    if !streams && wants(checkpoint, options, "audio") {
        let audio = Audio::read(checkpoint, options)?;
        let precision = AUDIO_WEIGHTS.precision(options);
        add("audio_enc", precision, audio.graphs(checkpoint, precision)?);
        tables.push(audio.tables(checkpoint, config.hidden)?);
        let ends = ["eoa_token_id", "eoa_token_index"];
        let end = ends.into_iter().find(|key| checkpoint.config().get(*key).is_some());
        let mut values = audio.params();
        let keys = ["audio_token_id", "boa_token_id", end.unwrap_or(ends[0])];
        values.extend(tokens(checkpoint, keys)?);
        params.insert("audio".to_owned(), Value::Object(values));
        params.insert("transcription".to_owned(), transcription(checkpoint)?);
    } else {
        checkpoint.leave_out("audio_tower");
        checkpoint.leave_out("embed_audio");
    }
    let family = if streams { "gemma3n" } else { "gemma4" };
    Ok(Recipe::new(family, "gemma4_split_generate", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?)
        .params(params)
        .tables(tables))
}

/// The numbers of tokens that graphs take at once: those of the prefill graphs, and `verify`.
fn step_rows(options: &RecipeOptions, verify: Option<usize>) -> Result<Vec<usize>> {
    let mut rows = prefill_rows(options, &PREFILL_ROWS)?;
    let Some(verify) = verify else { return Ok(rows) };
    if verify > options.max_ctx {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "recipe option {}={verify}: expected at most {}, the context",
                VERIFY.name, options.max_ctx
            ),
        ));
    }
    rows.push(verify);
    rows.sort_unstable();
    rows.dedup();
    Ok(rows)
}

/// True if the checkpoint has a tower, and the bundle should have it.
fn wants(checkpoint: &Checkpoint, options: &RecipeOptions, tower: &str) -> bool {
    let there = checkpoint.config().get(format!("{tower}_config")).is_some_and(Value::is_object);
    there && options.choice(TOWERS.name).is_none_or(|towers| towers == "all" || towers == tower)
}

/// The tokens `token_id`, `begin_token_id` and `end_token_id` of a kind of media, from these keys of the configuration.
fn tokens(checkpoint: &Checkpoint, keys: [&str; 3]) -> Result<Map<String, Value>> {
    let reader = Reader::whole(checkpoint);
    let names = ["token_id", "begin_token_id", "end_token_id"];
    let id = |(name, key): (&str, &str)| Ok((name.to_owned(), json!(reader.size(key)?)));
    names.into_iter().zip(keys).map(id).collect()
}

/// The request for a transcription: of a checkpoint that is tuned to answer, in a message of a conversation.
fn transcription(checkpoint: &Checkpoint) -> Result<Value> {
    if has_chat_template(checkpoint)? {
        return Ok(json!({"prompt": REQUEST, "chat": true}));
    }
    Ok(json!({"prompt": COMPLETION}))
}

fn params(config: &Config, max_ctx: usize, window: usize) -> Map<String, Value> {
    let [full, sliding] = config.heads;
    let mut params = DecoderParams {
        hidden: config.hidden,
        vocab: config.vocab,
        layers: config.layers(),
        heads: sliding,
        rope_theta: config.ropes[1].theta,
    }
    .map(max_ctx);
    let scaling = |rope: Rope| match rope.share {
        None => json!({"rope_type": "default"}),
        Some(share) => json!({"rope_type": "proportional", "partial_rotary_factor": share}),
    };
    params.extend(object(json!({
        "embed_scale": (config.hidden as f64).sqrt() as f32,
        "kv_shared_layers": config.shared,
        "full": {
            "head_dim": full.dim,
            "rope_theta": config.ropes[0].theta,
            "rope_scaling": scaling(config.ropes[0]),
        },
        "sliding": {
            "layers": (0..config.layers()).filter(|i| config.sliding[*i]).collect::<Vec<_>>(),
            "window": window,
            "head_dim": sliding.dim,
            "rope_theta": config.ropes[1].theta,
            "rope_scaling": scaling(config.ropes[1]),
        },
        "ple": {
            "width": config.ple, "pad_token_id": config.pad, "eps": config.eps, "vocab": config.ple_vocab,
        },
        "final_logit_softcapping": config.softcap,
    })));
    params
}

/// Tables for per-layer inputs: the table `[vocab, layers · width]`, and where no graph `projects`, the projection
/// `[layers · width, hidden]` and the norm `[width]`. The table is the largest tensor of a model, 5.6 GB at E4B in f16
/// and half of it in int8; it is written some rows at a time.
fn per_layer_tables(
    checkpoint: &Checkpoint,
    config: &Config,
    precision: Precision,
    projects: bool,
) -> Result<Tables> {
    let width = config.layers().saturating_mul(config.ple);
    let matrix = |name: &str, shape| checkpoint.matrix(&format!("{name}.weight"), shape);
    let table = matrix("embed_tokens_per_layer", [config.ple_vocab, width])?;
    let mut files = vec![MatrixFile::in_precision(precision, "table", "ple_table", table)];
    if !projects {
        let norm = checkpoint.rows("per_layer_projection_norm.weight", &[config.ple])?;
        let matrix = matrix("per_layer_model_projection", [width, config.hidden])?;
        files.push(MatrixFile::stored("proj", "ple_proj", matrix));
        files.push(MatrixFile::stored("norm", "ple_norm", norm));
    }
    Ok(matrices("ple", files))
}
