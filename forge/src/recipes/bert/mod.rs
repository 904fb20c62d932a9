//! BERT and its like: RoBERTa, XLM-RoBERTa, MPNet, DistilBERT, NomicBERT, GTE and Jina v3; and rerankers that are one
//! with a head of one value.
//!
//! Arithmetic: `transformers`, `models/{bert,roberta,xlm_roberta,mpnet,distilbert,nomic_bert,gte,jina_embeddings_v3}`.
//! Graphs `enc` take S tokens, a text or a pair of texts with its padding.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `x` → `y` | `[S, hidden]` | the sum of the rows for token, position and type in; the last layer's rows out |
//! | `cmask` | `[S, S]`, or `[1, S]` where S > 512 | added to scores; hides padding, and texts from each other |
//! | `cos`, `sin` | `[S, head_dim / 2]` | half tables, where positions are rotary |

mod classes;
mod config;

use std::ops::Range;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use qhx_graph::weight::{read, row_range};
use serde_json::{Value, json};

use super::encoder::{self, Encoder, activate, max_text};
use crate::kit::{
    Attend, AttendInputs, Attention, Layers, MatrixFile, Mlp, Reader, check_shape, matrices, object,
};
use crate::recipe::{Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::{RecipeEntry, RecipeOption};
use classes::Head;
use config::Config;

const ENCODERS: [&str; 19] = [
    "BertModel",
    "BertForMaskedLM",
    "RobertaModel",
    "RobertaForMaskedLM",
    "XLMRobertaModel",
    "XLMRobertaForMaskedLM",
    "CamembertModel",
    "CamembertForMaskedLM",
    "MPNetModel",
    "MPNetForMaskedLM",
    "DistilBertModel",
    "DistilBertForMaskedLM",
    "NomicBertModel",
    "NomicBertForMaskedLM",
    "NewModel",
    "NewForMaskedLM",
    "GteModel",
    "JinaEmbeddingsV3Model",
    "JinaEmbeddingsV3ForMaskedLM",
];
const RERANKERS: [&str; 10] = [
    "BertForSequenceClassification",
    "RobertaForSequenceClassification",
    "XLMRobertaForSequenceClassification",
    "CamembertForSequenceClassification",
    "MPNetForSequenceClassification",
    "DistilBertForSequenceClassification",
    "NomicBertForSequenceClassification",
    "NewForSequenceClassification",
    "GteForSequenceClassification",
    "JinaEmbeddingsV3ForSequenceClassification",
];
/// Distance from which on all tokens are alike far (`MPNetEncoder.relative_position_bucket`).
const FAR: f64 = 128.0;
/// Buckets of distances, whatever the configuration has in its table (`compute_position_bias`).
const BUCKETS: usize = 32;
/// More buckets than any table has.
const MAX_BUCKETS: usize = 4096;

register_recipe!(
    RecipeEntry::new(&ENCODERS, recipe)
        .tasks(&[Task::Embed])
        .prefill_graphs()
        .longest(longest)
        .options(&OPTIONS)
);
register_recipe!(
    RecipeEntry::new(&RERANKERS, recipe).tasks(&[Task::Score]).prefill_graphs().longest(longest)
);

/// The adapter of a checkpoint that has several for each of its weights, by the name of its task.
const ADAPTER: RecipeOption = RecipeOption {
    name: "adapter",
    values: &[],
    help: "the task of a checkpoint with adapters in it, such as retrieval.query of jina-embeddings-v3: its adapter is \
           merged, and its instruction stands before texts [default: none, the weights as they are]",
};
const OPTIONS: [RecipeOption; 5] = {
    let [pooling, query, document, dimensions] = encoder::OPTIONS;
    [pooling, query, document, dimensions, ADAPTER]
};

/// The checkpoint with the adapter that is asked for, and the instruction that goes with it.
fn adapted(
    checkpoint: &Checkpoint,
    options: &RecipeOptions,
) -> Result<(Checkpoint, Option<String>)> {
    let reader = Reader::new(checkpoint);
    let tasks = reader.get("lora_adaptations").and_then(Value::as_array);
    let names: Vec<_> = tasks.into_iter().flatten().map(Value::as_str).collect();
    let asked = ADAPTER.choice(options);
    let chosen = asked.map(|asked| names.iter().position(|name| *name == Some(asked)));
    let chosen = match (asked, chosen) {
        (Some(asked), Some(None)) => {
            let known: Vec<_> = names.iter().flatten().copied().collect();
            let known = if known.is_empty() {
                "none: there are no adapters".to_owned()
            } else {
                known.join(", ")
            };
            let what = format!("recipe option {}: {asked:?}, expected {known}", ADAPTER.name);
            return Err(Error::new(ErrorKind::Usage, what));
        }
        (_, chosen) => chosen.flatten(),
    };
    if names.is_empty() {
        return Ok((checkpoint.clone(), None));
    }
    let alpha = reader.positive(&["lora_alpha"])?.unwrap_or(1.0);
    let scale = alpha / reader.size_or("lora_rank", 4)? as f64;
    let adapted = checkpoint.with_adapter_inside(chosen, scale as f32)?;
    let instruction = asked.and_then(|task| reader.get("task_instructions")?.get(task)?.as_str());
    Ok((adapted, instruction.map(str::to_owned)))
}

/// Max length of texts: that of `sentence-transformers` for the checkpoint, but no more than its positions.
fn longest(checkpoint: &Checkpoint, _: Task) -> Option<usize> {
    let positions =
        Config::read(checkpoint, classes::of(checkpoint.architecture())).ok()?.positions;
    Some(max_text(checkpoint).ok()?.map_or(positions, |text| text.min(positions)))
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let class = classes::of(checkpoint.architecture());
    let (checkpoint, instruction) = adapted(&checkpoint.renamed(class.names), options)?;
    let checkpoint = &checkpoint;
    let config = Config::read(checkpoint, class)?;
    check_shape(options, config.layers, Some(config.positions))?;
    // Buffers of older checkpoints, and what only training and other heads read.
    for part in [
        "embeddings.position_ids",
        "lm_head",
        "cls",
        "vocab_transform",
        "vocab_projector",
        "vocab_layer_norm",
    ] {
        checkpoint.leave_out(part);
    }
    let mut encoder = match options.task {
        Task::Score => Encoder::scoring(checkpoint, false, "cls", &config.head(), None)?,
        _ => Encoder::read_centred(checkpoint, options, config.hidden, false, class.centred)?,
    };
    if options.task == Task::Embed && checkpoint.seed().is_none() {
        encoder.modules.heads_of_tokens(checkpoint.dir(), config.hidden)?;
        // That of gte-multilingual-base.
        if checkpoint.has("classifier.weight") {
            encoder.modules.weights_of_tokens(checkpoint, "classifier.", config.hidden)?;
        }
    }
    if let Some(instruction) = instruction {
        for (prefix, option) in [
            (&mut encoder.query_prefix, encoder::QUERY_PREFIX),
            (&mut encoder.document_prefix, encoder::DOCUMENT_PREFIX),
        ] {
            if option.choice(options).is_none() {
                prefix.clone_from(&instruction);
            }
        }
    }
    if options.task != Task::Score || class.head != Head::Pooler {
        checkpoint.leave_out("pooler");
    }
    let parts = Layers::decoder(checkpoint, options, config.eps);
    let Config { hidden, vocab, layers, heads, .. } = config;
    let mut params = object(json!({
        "hidden": hidden,
        "vocab": vocab,
        "n_layers": layers,
        "max_ctx": options.max_ctx,
        "n_heads": heads.query,
    }));
    if let Some(rope) = config.rope {
        params.extend(object(json!({"head_dim": heads.dim, "rope_theta": rope.theta})));
        params.extend(rope.scaling().map(|scaling| ("rope_scaling".to_owned(), scaling)));
    }
    let table = |name: &str, rows: usize| {
        checkpoint.matrix(&format!("embeddings.{name}_embeddings.weight"), [rows, hidden])
    };
    let mut files = Vec::new();
    if config.rope.is_none() {
        let places = config.places();
        let positions = row_range(&table("position", places.end)?, places);
        files.push(MatrixFile::stored("positions", "positions", positions));
    }
    if config.types > 0 {
        files.push(MatrixFile::stored("types", "types", table("token_type", config.types)?));
    }
    let biases = class.relative.then(|| distances(checkpoint, &config)).transpose()?;
    let model = Model { parts: &parts, config: &config, biases };
    let embed = (layers, table("word", vocab)?);
    let mut recipe =
        encoder.recipe(class.family, options, embed, params, |name, range, rows, mask_rows| {
            model.graph(name, range, rows, mask_rows)
        })?;
    if !files.is_empty() {
        recipe.tables.push(matrices("embeddings", files));
    }
    let reader = Reader::new(checkpoint);
    if let (Some(tasks), None) = (reader.get("lora_adaptations"), ADAPTER.choice(options)) {
        let note = format!(
            "no adapter of the checkpoint is merged, as without a task in sentence-transformers: {tasks}; \
             --recipe-option adapter=NAME merges one"
        );
        recipe.notes.push(note);
    }
    Ok(recipe)
}

/// For each head the numbers of the buckets of distances.
fn distances(checkpoint: &Checkpoint, config: &Config) -> Result<Vec<Vec<f32>>> {
    let (buckets, heads) = (config.buckets, config.heads.query);
    if !(BUCKETS..=MAX_BUCKETS).contains(&buckets) {
        return Err(Reader::new(checkpoint).fault(format!(
            "relative_attention_num_buckets is {buckets}, expected {BUCKETS} to {MAX_BUCKETS}: the class computes with \
             {BUCKETS}"
        )));
    }
    let table = checkpoint.matrix("relative_attention_bias.weight", [buckets, heads])?;
    let mut values = vec![0.0; buckets * heads];
    read(&*table, 0, &mut values)?;
    let of = |head: usize| values.iter().skip(head).step_by(heads).copied().collect();
    Ok((0..heads).map(of).collect())
}

/// Bucket of the distance from a token to one that it sees: half of them for those behind it, the near ones a bucket
/// each, the others by their logarithm.
fn bucket(from: usize, to: usize) -> usize {
    let (half, exact) = (BUCKETS / 2, BUCKETS / 4);
    let behind = if to > from { half } else { 0 };
    let distance = from.abs_diff(to);
    let place = if distance < exact {
        distance
    } else {
        // In f32, as torch computes it.
        let share = (distance as f32 / exact as f32).ln() / (FAR / exact as f64).ln() as f32;
        (exact + (share * (half - exact) as f32) as usize).min(half - 1)
    };
    behind + place
}

/// A model that graphs are made of.
struct Model<'a> {
    parts: &'a Layers<'a>,
    config: &'a Config,
    /// For each head the numbers of the buckets of distances.
    biases: Option<Vec<Vec<f32>>>,
}

impl Model<'_> {
    /// `rows` tokens through the layers of `range`.
    fn graph(
        &self,
        name: &str,
        range: Range<usize>,
        rows: usize,
        mask_rows: usize,
    ) -> Result<Graph> {
        let Self { parts, config, biases } = self;
        let mut b = GraphBuilder::new(name);
        let mut h = b.input("x", Elem::Activation, &[rows, config.hidden])?;
        let rotary = config.rope.map_or(0, |_| config.heads.dim);
        let inputs = AttendInputs { mask_rows, ..AttendInputs::new(rotary, rows, 0) };
        let attend = Attend::inputs(&mut b, &inputs)?;
        let masks = match biases {
            Some(biases) => {
                b.scope("distances");
                let square = |buckets: &Vec<f32>| {
                    let pairs =
                        (0..rows).flat_map(|from| (0..rows).map(move |to| bucket(from, to)));
                    pairs.map(|bucket| buckets.get(bucket).copied().unwrap_or(0.0)).collect()
                };
                Some(attend.biased(&mut b, biases.iter().map(square))?)
            }
            None => None,
        };
        if range.start == 0 {
            b.scope("embeddings");
            h = parts.layer_norm(&mut b, h, "embeddings.LayerNorm")?;
        }
        for index in range {
            h = self.layer(&mut b, h, index, &attend, masks.as_deref())?;
        }
        b.output("y", h)?;
        b.finish()
    }

    /// A layer on rows `[rows, hidden]`: attention and a feed-forward, each added to the rows before a LayerNorm.
    fn layer(
        &self,
        b: &mut GraphBuilder,
        h: TensorId,
        layer: usize,
        attend: &Attend,
        masks: Option<&[TensorId]>,
    ) -> Result<TensorId> {
        let Self { parts, config, .. } = self;
        let tensor = |part: &str| format!("layers.{layer}.{part}");
        b.scope(format!("l{layer}_attn"));
        let biased = config.class.biased;
        let joined = parts.checkpoint.has(&tensor("self_attn.qkv_proj.weight"));
        let attention = Attention {
            joined: joined.then_some("qkv_proj"),
            bias: [biased; 3],
            out_bias: biased,
            turned: config.rope.is_some(),
            masks,
            cached: false,
            ..Attention::new(tensor("self_attn"), layer, config.heads)
        };
        let mixed = parts.attention(b, h, &attention, attend)?;
        let h = b.add(h, mixed)?;
        let h = parts.layer_norm(b, h, &tensor("post_attention_layernorm"))?;
        let act = |b: &mut GraphBuilder, x| activate(b, x, &config.activation);
        let out = match config.gated {
            Some(gated) => {
                b.scope(format!("l{layer}_mlp"));
                let joined = parts.checkpoint.has(&tensor("mlp.up_gate_proj.weight"));
                let mlp = Mlp {
                    joined: joined.then_some("up_gate_proj"),
                    up_first: true,
                    down_bias: gated.down_bias,
                    ..Mlp::new(tensor("mlp"), config.intermediate)
                };
                parts.mlp(b, h, &mlp, act)?
            }
            None => {
                b.scope(format!("l{layer}_up"));
                let inner = parts.linear(b, h, &tensor("mlp.fc1"), config.intermediate, true)?;
                let inner = act(b, inner)?;
                b.scope(format!("l{layer}_down"));
                parts.linear(b, inner, &tensor("mlp.fc2"), config.hidden, true)?
            }
        };
        let h = b.add(h, out)?;
        parts.layer_norm(b, h, &tensor("post_mlp_layernorm"))
    }
}
