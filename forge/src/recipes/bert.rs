//! BERT and RoBERTa encoders (also XLM-RoBERTa), and rerankers that are one with a head of one value.
//!
//! Arithmetic: `transformers`, `models/{bert,roberta,xlm_roberta}`. Graphs `enc` take S tokens, a text or a pair of
//! texts with its padding.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `x` → `y` | `[S, hidden]` | the sum of the rows for token, position and type in; the last layer's rows out |
//! | `cmask` | `[S, S]`, or `[1, S]` where S > 512 | added to scores; hides padding, and texts from each other |

use std::ops::Range;

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use qhx_graph::weight::row_range;
use serde_json::json;

use super::encoder::{self, Dense, Encoder, max_text};
use crate::kit::{
    Attend, AttendInputs, Attention, Heads, Layers, MatrixFile, Reader, check_shape, matrices,
    object,
};
use crate::recipe::{Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::RecipeEntry;

const ENCODERS: [&str; 4] = ["BertModel", "RobertaModel", "XLMRobertaModel", "CamembertModel"];
const RERANKERS: [&str; 4] = [
    "BertForSequenceClassification",
    "RobertaForSequenceClassification",
    "XLMRobertaForSequenceClassification",
    "CamembertForSequenceClassification",
];

register_recipe!(
    RecipeEntry::new(&ENCODERS, recipe)
        .tasks(&[Task::Embed])
        .prefill_graphs()
        .longest(longest)
        .options(&[encoder::POOLING])
);
register_recipe!(
    RecipeEntry::new(&RERANKERS, recipe).tasks(&[Task::Score]).prefill_graphs().longest(longest)
);

/// Names of a tensor: the attention's of the kit are others here, and a model with a head has a prefix.
fn names(name: &str) -> Vec<String> {
    let mut own = name.to_owned();
    for (kit, here) in [
        ("self_attn.q_proj", "attention.self.query"),
        ("self_attn.k_proj", "attention.self.key"),
        ("self_attn.v_proj", "attention.self.value"),
        ("self_attn.o_proj", "attention.output.dense"),
    ] {
        own = own.replace(kit, here);
    }
    ["", "bert.", "roberta."].map(|prefix| format!("{prefix}{own}")).to_vec()
}

/// Sizes and constants of a model; where a key is absent, those of `BertConfig`.
struct Config {
    roberta: bool,
    hidden: usize,
    vocab: usize,
    intermediate: usize,
    layers: usize,
    heads: Heads,
    eps: f32,
    /// Positions of the longest text.
    positions: usize,
    /// Row of the table of positions that the first token has: RoBERTa counts from behind its padding token.
    first: usize,
    types: usize,
}

impl Config {
    fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        reader.only("hidden_act", &json!("gelu"))?;
        reader.only("position_embedding_type", &json!("absolute"))?;
        reader.only("is_decoder", &json!(false))?;
        reader.only("add_cross_attention", &json!(false))?;
        let roberta = !checkpoint.architecture().is_some_and(|class| class.starts_with("Bert"));
        let hidden = reader.size_or("hidden_size", 768)?;
        let rows = reader.size_or("max_position_embeddings", 512)?;
        let first = match reader.get("pad_token_id").filter(|_| roberta) {
            None => 2 * usize::from(roberta),
            Some(padding) => match padding.as_u64().filter(|padding| *padding < rows as u64) {
                Some(padding) => padding as usize + 1,
                None => return Err(reader.bad("pad_token_id", padding, "a row of positions")),
            },
        };
        let positions = rows.checked_sub(first).filter(|positions| *positions > 0);
        Ok(Self {
            roberta,
            hidden,
            vocab: reader.size("vocab_size")?,
            intermediate: reader.size_or("intermediate_size", 3072)?,
            layers: reader.layers()?,
            heads: reader.heads(hidden, None, None)?,
            eps: reader.epsilon(&["layer_norm_eps"], if roberta { 1e-5 } else { 1e-12 })?,
            positions: positions.ok_or_else(|| {
                reader.fault(format!(
                    "max_position_embeddings is {rows}, expected more than {first}, from which pad_token_id has \
                     positions begin"
                ))
            })?,
            first,
            types: reader.size_or("type_vocab_size", 2)?,
        })
    }

    fn first_and_end(&self) -> Range<usize> {
        self.first..self.first + self.positions
    }

    /// The head of a reranker: `BertPooler` and a classifier, or `RobertaClassificationHead`.
    fn head(&self) -> [Dense<'static>; 2] {
        let names = match self.roberta {
            true => ["classifier.dense", "classifier.out_proj"],
            false => ["pooler.dense", "classifier"],
        };
        let dense = |name, outputs, activation| Dense {
            name,
            shape: [outputs, self.hidden],
            bias: true,
            activation,
            temperature: 1.0,
        };
        [dense(names[0], self.hidden, "tanh"), dense(names[1], 1, "identity")]
    }
}

/// Max length of texts: that of `sentence-transformers` for the checkpoint, but no more than its positions.
fn longest(checkpoint: &Checkpoint, _: Task) -> Option<usize> {
    let positions = Config::read(checkpoint).ok()?.positions;
    Some(max_text(checkpoint).ok()?.map_or(positions, |text| text.min(positions)))
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(names);
    let config = Config::read(checkpoint)?;
    check_shape(options, config.layers, Some(config.positions))?;
    // Buffers of older checkpoints, and what only training and other heads read.
    checkpoint.leave_out("embeddings.position_ids");
    let encoder = match options.task {
        Task::Score => Encoder::scoring(checkpoint, false, "cls", &config.head(), None)?,
        _ => Encoder::read(checkpoint, options, config.hidden, false)?,
    };
    if options.task != Task::Score || config.roberta {
        checkpoint.leave_out("pooler");
    }
    let parts = Layers::decoder(checkpoint, options, config.eps);
    let Config { hidden, vocab, layers, heads, .. } = config;
    let params = object(json!({
        "hidden": hidden,
        "vocab": vocab,
        "n_layers": layers,
        "max_ctx": options.max_ctx,
        "n_heads": heads.query,
    }));
    let table = |name: &str, rows: usize| {
        checkpoint.matrix(&format!("embeddings.{name}_embeddings.weight"), [rows, hidden])
    };
    let positions = table("position", config.first_and_end().end)?;
    let positions = row_range(&positions, config.first_and_end());
    let embed = (layers, table("word", vocab)?);
    let mut recipe =
        encoder.recipe("bert", options, embed, params, |name, range, rows, mask_rows| {
            graph(&parts, &config, name, range, rows, mask_rows)
        })?;
    recipe.tables.push(matrices(
        "embeddings",
        vec![
            MatrixFile::stored("positions", "positions", positions),
            MatrixFile::stored("types", "types", table("token_type", config.types)?),
        ],
    ));
    Ok(recipe)
}

/// `rows` tokens through the layers of `range`.
fn graph(
    parts: &Layers<'_>,
    config: &Config,
    name: &str,
    range: Range<usize>,
    rows: usize,
    mask_rows: usize,
) -> Result<Graph> {
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[rows, config.hidden])?;
    let inputs = AttendInputs { mask_rows, ..AttendInputs::new(0, rows, 0) };
    let attend = Attend::inputs(&mut b, &inputs)?;
    if range.start == 0 {
        b.scope("embeddings");
        h = parts.layer_norm(&mut b, h, "embeddings.LayerNorm")?;
    }
    for index in range {
        h = layer(parts, config, &mut b, h, index, &attend)?;
    }
    b.output("y", h)?;
    b.finish()
}

/// `BertLayer` on rows `[rows, hidden]`: attention and an MLP with GELU, each added to the rows before a LayerNorm.
fn layer(
    parts: &Layers<'_>,
    config: &Config,
    b: &mut GraphBuilder,
    h: TensorId,
    layer: usize,
    attend: &Attend,
) -> Result<TensorId> {
    let tensor = |part: &str| format!("encoder.layer.{layer}.{part}");
    b.scope(format!("l{layer}_attn"));
    let attention = Attention {
        bias: [true; 3],
        out_bias: true,
        cached: false,
        ..Attention::new(tensor("self_attn"), layer, config.heads)
    };
    let mixed = parts.attention(b, h, &attention, attend)?;
    let h = b.add(h, mixed)?;
    let h = parts.layer_norm(b, h, &tensor("attention.output.LayerNorm"))?;
    b.scope(format!("l{layer}_up"));
    let inner = parts.linear(b, h, &tensor("intermediate.dense"), config.intermediate, true)?;
    let inner = b.gelu(inner)?;
    b.scope(format!("l{layer}_down"));
    let out = parts.linear(b, inner, &tensor("output.dense"), config.hidden, true)?;
    let h = b.add(h, out)?;
    parts.layer_norm(b, h, &tensor("output.LayerNorm"))
}
