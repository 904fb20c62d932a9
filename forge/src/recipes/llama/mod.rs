//! Llama-like models: Llama, Mistral, Qwen2, Qwen3, Phi-3, SmolLM3, Granite, OLMo 2 and 3, Gemma 1 and 2, EXAONE 4,
//! Ministral 3, ERNIE 4.5, HunYuan and gpt-oss as decoders (`…ForCausalLM`), and the first four as encoders (`…Model`,
//! `MistralBiDirectionalModel`, `LlamaBidirectionalModel`, `Ministral3BidirectionalModel`) and rerankers
//! (`…ForSequenceClassification`).
//!
//! Arithmetic: `transformers`, `models/` of these names, stated in `tests/oracle/LLAMA.md`.
//!
//! Decoder: graphs `decode` take one token, graphs `prefill<P>` take P tokens of a prompt over the
//! same caches, each shard in a context of its own; the head is a graph of its own.
//!
//! | tensor | shape, P = 1 for `decode` | |
//! |---|---|---|
//! | `x` → `y` | `[P, hidden]` | residual in and out; normalised after the last layer |
//! | `cos`, `sin` | `[P, rotary_dim / 2]` | half tables, a row for each token |
//! | `cos_local`, `sin_local` | `[P, rotary_dim / 2]` | of sliding layers, where theirs are others |
//! | `q_scale` | `[P, 1]` | what multiplies queries, where they grow with the position |
//! | `cmask`; `cmask_local` | `[P, rows + P]` | added to scores of full and of sliding layers; the last P slots are the graph's own tokens |
//! | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[kv_heads, rows, head_dim]` → `[kv_heads, P, head_dim]` | keys after norm and rope |
//! | head: `x` → `logits` | `[1, hidden]` → `[1, vocab]` | before the softcap |
//!
//! `rows` is `max_ctx` for full layers. For sliding ones it is the window, or P of the widest graph where that is more,
//! and the host keeps the cache as a ring. Where the window is no shorter than the context, all layers are full.
//!
//! Decoder with experts (`Qwen3MoeForCausalLM`, `GptOssForCausalLM`): graphs `decode<n>` and `prefill<P>_<n>` end
//! where a layer's experts begin, see [`crate::kit::Experts`]; the head normalises.
//!
//! Encoder: graphs `enc` take S tokens, a text with its padding.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `x` → `y` | `[S, hidden]` | residual in and out; normalised after the last layer |
//! | `cos`, `sin` | `[S, rotary_dim / 2]` | |
//! | `cmask` | `[S, S]`, or `[1, S]` where S > 512 and texts are not causal | added to scores; hides padding, and texts from each other |

mod classes;
mod config;
mod layers;
mod rope;

use std::ops::Range;

use serde_json::{Map, Value, json};

use super::encoder::{self, Dense, Encoder, bidirectional};
use crate::kit::{
    AttendInputs, Decoder, DecoderParams, EXPERTS, ExpertNames, Layers, PREFILL_ROWS, Reader,
    check_shape, decoder, expert_decoder, object, prefill_rows,
};
use crate::recipe::{Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::RecipeEntry;
use classes::Class;
use config::Config;
use layers::{Shared, head, layer, residual, until_experts};
use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph};
use rope::Growth;

const DECODERS: [&str; 16] = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "SmolLM3ForCausalLM",
    "GraniteForCausalLM",
    "Olmo2ForCausalLM",
    "Gemma2ForCausalLM",
    "GemmaForCausalLM",
    "Olmo3ForCausalLM",
    "Exaone4ForCausalLM",
    "Ministral3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_ForCausalLM",
    "HunYuanDenseV1ForCausalLM",
];
const ENCODERS: [&str; 7] = [
    "LlamaModel",
    "MistralModel",
    "Qwen2Model",
    "Qwen3Model",
    "MistralBiDirectionalModel",
    "LlamaBidirectionalModel",
    "Ministral3BidirectionalModel",
];
/// With a head `score` of one value.
const RERANKERS: [&str; 5] = [
    "LlamaForSequenceClassification",
    "MistralForSequenceClassification",
    "Qwen2ForSequenceClassification",
    "Qwen3ForSequenceClassification",
    "LlamaBidirectionalForSequenceClassification",
];
/// Prompt of a bidirectional reranker of Nvidia, from the model card of llama-3.2-nv-rerankqa-1b-v2.
const PASSAGE: &str = "question:{query} \n \n passage:{document}";

register_recipe!(
    RecipeEntry::new(&DECODERS, recipe)
        .tasks(&[Task::Generate, Task::Embed])
        .prefill_graphs()
        .smaller_contexts()
        .int8_caches()
        .longest(longest)
        .options(&encoder::OPTIONS)
);
register_recipe!(
    RecipeEntry::new(&["Qwen3MoeForCausalLM", "GptOssForCausalLM"], recipe)
        .prefill_graphs()
        .smaller_contexts()
        .int8_caches()
        .longest(longest)
        .options(&[EXPERTS])
);
register_recipe!(
    RecipeEntry::new(&ENCODERS, recipe)
        .tasks(&[Task::Embed])
        .prefill_graphs()
        .longest(longest)
        .options(&encoder::OPTIONS)
);
register_recipe!(
    RecipeEntry::new(&RERANKERS, recipe).tasks(&[Task::Score]).prefill_graphs().longest(longest)
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let config = Config::read(checkpoint, class(checkpoint)?, options.max_ctx)?;
    check_shape(options, config.layers, config.rope.max_positions)?;
    let of_vectors = encoder::OPTIONS.iter().find(|option| option.choice(options).is_some());
    if let (Task::Generate, Some(option)) = (options.task, of_vectors) {
        let what =
            format!("recipe option {}: a bundle that generates makes no vectors", option.name);
        let hint = "omit it, or make vectors: --task embed";
        return Err(Error::new(ErrorKind::Usage, what).hint(hint));
    }
    match options.task {
        Task::Generate => generate(checkpoint, &config, options),
        Task::Embed => {
            let causal = !bidirectional(checkpoint.config());
            let encoder = Encoder::read(checkpoint, options, config.hidden, causal)?;
            encode(checkpoint, &config, options, encoder)
        }
        Task::Score => encode(checkpoint, &config, options, reranker(checkpoint, &config)?),
        other => Err(no_graphs(other)),
    }
}

/// Longest context of a task: as long as an encoder's own texts.
fn longest(checkpoint: &Checkpoint, task: Task) -> Option<usize> {
    // What cannot be read is reported when the recipe reads it.
    match task {
        Task::Embed | Task::Score => encoder::max_text(checkpoint).ok()?,
        _ => None,
    }
}

/// The registration lets no other task through.
fn no_graphs(task: Task) -> Error {
    Error::new(ErrorKind::Internal, format!("no graphs are known for the task {}", task.name()))
}

fn class(checkpoint: &Checkpoint) -> Result<&'static Class> {
    let name = checkpoint.architecture().unwrap_or_default();
    Class::of(name).ok_or_else(|| {
        Error::new(ErrorKind::Internal, format!("model class {name:?} has no Llama-like recipe"))
    })
}

/// A causal layer that slides would see fewer positions than the graphs of encoders show it.
fn check_window(config: &Config, options: &RecipeOptions) -> Result<()> {
    let Some(window) = config.window_within(options.max_ctx) else { return Ok(()) };
    Err(Error::new(
        ErrorKind::Usage,
        format!(
            "a context of {} tokens, but layers of this model see only the last {window} \
             (sliding_window), which the graphs do not limit",
            options.max_ctx
        ),
    )
    .hint(format!("make the bundle for a context of at most {window} tokens")))
}

/// The decoder of a checkpoint that has more parts, whose class is the one of its configuration's `model_type`.
pub(super) fn decoder_part(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let reader = Reader::new(checkpoint);
    let kind = reader.get("model_type").unwrap_or(&Value::Null);
    let class = kind.as_str().and_then(Class::of_type).ok_or_else(|| {
        reader.bad("text_config.model_type", kind, "a Llama-like decoder, such as \"qwen3\"")
    })?;
    let config = Config::read(checkpoint, class, options.max_ctx)?;
    check_shape(options, config.layers, config.rope.max_positions)?;
    generate(checkpoint, &config, options)
}

fn generate(checkpoint: &Checkpoint, config: &Config, options: &RecipeOptions) -> Result<Recipe> {
    if bidirectional(checkpoint.config()) {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "{} is an encoder (each token sees those after it), which cannot generate",
                checkpoint.dir().display()
            ),
        )
        .hint("make vectors with it: --task embed"));
    }
    let layers = layers(checkpoint, config, options);
    let mut params = params(config, options);
    if let Some(cap) = config.logits_cap {
        params.insert("final_logit_softcapping".to_owned(), json!(cap));
    }
    let inputs = |step| AttendInputs::of(config.rope.rotary, step);
    let prompts = prefill_rows(options, &PREFILL_ROWS)?;
    let window = config.local_window(options.max_ctx);
    // A step writes all of its rows into the ring at once.
    let ring = window.map(|window| prompts.iter().fold(window, |ring, rows| ring.max(*rows)));
    if let Some(window) = window {
        let sliding = (0..config.layers).filter(|layer| config.sliding[*layer]);
        let mut local = object(json!({"layers": sliding.collect::<Vec<_>>(), "window": window}));
        if let Some(rope) = &config.local {
            local.extend(rope.params());
        }
        params.insert("local".to_owned(), Value::Object(local));
    }
    let (decoder, tables) = match &config.sparse {
        None => {
            let decoder = decoder(
                options,
                config.layers,
                &prompts,
                |name, range, step| run(&layers, config, name, range, inputs(step), ring),
                head(&layers, config)?,
            )?;
            (decoder, Vec::new())
        }
        Some(sparse) => {
            params.extend(object(json!({
                "n_experts": sparse.experts.count,
                "router": {"rule": "softmax", "normalize": sparse.normalize},
            })));
            let decoder = expert_decoder(
                options,
                &sparse.layers,
                &prompts,
                &sparse.experts,
                |name, range, step| {
                    until_experts(&layers, config, sparse, name, range, (&inputs(step), ring))
                },
                residual(&layers, config).lmhead(
                    config.hidden,
                    config.vocab,
                    config.tied,
                    Some("norm"),
                )?,
            )?;
            let with_experts = (0..config.layers).filter(|layer| sparse.layers[*layer]);
            let names = |layer| ExpertNames {
                interleaved: sparse.interleaved,
                ..ExpertNames::new(format!("layers.{layer}.mlp.experts"))
            };
            (decoder, vec![sparse.experts.tables(checkpoint, with_experts.map(names))?])
        }
    };
    let Decoder { contexts, plan_params } = decoder;
    Ok(Recipe::new(config.class.family, "llama_generate", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?)
        .params(params)
        .tables(tables))
}

fn layers<'a>(checkpoint: &'a Checkpoint, config: &Config, options: &RecipeOptions) -> Layers<'a> {
    let norm_offset = if config.class.gemma { 1.0 } else { 0.0 };
    Layers { norm_offset, ..Layers::decoder(checkpoint, options, config.eps) }
}

/// `GenericForSequenceClassification`, which scores the last token; of a bidirectional model, the mean of all, as its
/// own code has it, which divides scores by `temperature`.
fn reranker(checkpoint: &Checkpoint, config: &Config) -> Result<Encoder> {
    let reader = Reader::whole(checkpoint);
    let both_ways = bidirectional(checkpoint.config());
    if both_ways {
        reader.only("pooling", &json!("avg"))?;
    }
    let temperature = reader.positive(&["temperature"])?.filter(|_| both_ways).unwrap_or(1.0);
    let head = Dense {
        name: "score",
        shape: [1, config.hidden],
        bias: false,
        activation: "identity",
        temperature: temperature as f32,
        norm: None,
    };
    let pooling = if both_ways { "mean" } else { "last" };
    Encoder::scoring(checkpoint, !both_ways, pooling, &[head], both_ways.then_some(PASSAGE))
}

/// The graphs of an encoder: of vectors, or of scores.
fn encode(
    checkpoint: &Checkpoint,
    config: &Config,
    options: &RecipeOptions,
    encoder: Encoder,
) -> Result<Recipe> {
    if encoder.causal {
        check_window(config, options)?;
    }
    if let Some(Growth { original, .. }) = config.growth {
        let what = format!("queries grow from position {original} on, which encoders do not run");
        return Err(Error::new(ErrorKind::Usage, what).hint(format!("--max-ctx {original}")));
    }
    // Of a decoder that is used as an encoder.
    checkpoint.leave_out("lm_head");
    let layers = layers(checkpoint, config, options);
    let embed = checkpoint.matrix("embed_tokens.weight", [config.vocab, config.hidden])?;
    let (params, parts) = (params(config, options), (config.layers, embed));
    encoder.recipe(config.class.family, options, parts, params, |name, range, rows, mask_rows| {
        let attend = AttendInputs { mask_rows, ..AttendInputs::new(config.rope.rotary, rows, 0) };
        run(&layers, config, name, range, attend, None)
    })
}

fn params(config: &Config, options: &RecipeOptions) -> Map<String, Value> {
    let Config { hidden, vocab, layers, heads, ref rope, .. } = *config;
    let mut params =
        DecoderParams { hidden, vocab, layers, heads, rope_theta: rope.theta }.map(options.max_ctx);
    if rope.rotary != heads.dim {
        params.insert("rotary_dim".to_owned(), json!(rope.rotary));
    }
    if let Some(scaling) = &rope.scaling {
        params.insert("rope_scaling".to_owned(), scaling.clone());
    }
    if let Some(Growth { beta, original }) = config.growth {
        params.insert("query_growth".to_owned(), json!({"beta": beta, "original": original}));
    }
    params
}

/// Tokens through the layers of `range`. `ring` has the rows of the caches of sliding layers, where these do not see
/// all of the context.
fn run(
    layers: &Layers<'_>,
    config: &Config,
    name: &str,
    range: Range<usize>,
    inputs: AttendInputs<'_>,
    ring: Option<usize>,
) -> Result<Graph> {
    let last = range.end == config.layers;
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[inputs.rows, config.hidden])?;
    let Shared { full, local, growth } =
        Shared::inputs(&mut b, config, range.clone(), &inputs, ring)?;
    let embed_scale = config.embed_scale * config.residual;
    if range.start == 0 && embed_scale != 1.0 {
        h = b.scale(h, embed_scale)?;
    }
    for index in range {
        let attend = if config.slides(index, ring) { &local } else { &full };
        if let Some(attend) = attend {
            h = layer(layers, config, &mut b, h, index, attend, growth)?;
        }
    }
    if last {
        b.scope("final");
        h = residual(layers, config).norm(&mut b, h, "norm")?;
    }
    b.output("y", h)?;
    b.finish()
}
