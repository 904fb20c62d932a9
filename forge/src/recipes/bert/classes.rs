//! The model classes, and the names that their tensors have.

/// Place where a model has the positions of its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Positions {
    /// A table of rows, from its first on.
    Table,
    /// The same, from behind the row of the padding token on.
    BehindPadding,
    /// In queries and keys, which rotary tables turn.
    Rotary,
}

/// Layers that stand behind the first row of a reranker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Head {
    /// `BertPooler` and a classifier.
    Pooler,
    /// `RobertaClassificationHead`, and that of MPNet.
    Dense,
    /// `pre_classifier` and `classifier` of DistilBERT.
    PreClassifier,
}

/// Properties that the classes of one family have in common.
#[derive(Debug)]
pub(super) struct Class {
    /// The family in the manifest.
    pub family: &'static str,
    /// Beginnings of the names of its classes.
    starts: &'static [&'static str],
    pub positions: Positions,
    pub head: Head,
    /// The tokenizer's padding where the configuration does not say.
    pub padding: usize,
    /// Epsilon of the norms where the configuration does not say.
    pub eps: f32,
    /// Kinds of tokens where the configuration does not say; 0 where there are none.
    pub types: usize,
    /// Scores have a part for the distance of two tokens.
    pub relative: bool,
    /// Base of the rotary frequencies where the configuration does not say.
    pub theta: f64,
    /// Queries, keys and values, and the projection back, have biases.
    pub biased: bool,
    /// Activation where the configuration does not say.
    pub activation: &'static str,
    /// Vectors are centred before the first of their values become vectors, as the card of Nomic's has it.
    pub centred: bool,
    /// The feed-forward is gated, without biases but for that of the last projection.
    pub gated: Option<Gated>,
    pub names: fn(&str) -> Vec<String>,
}

/// A gated feed-forward.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gated {
    pub down_bias: bool,
}

/// Names as the recipe has them, and the checkpoint's, in this order.
type Names = &'static [(&'static str, &'static str)];

const BERT_NAMES: Names = &[
    ("layers.", "encoder.layer."),
    ("self_attn.q_proj", "attention.self.query"),
    ("self_attn.k_proj", "attention.self.key"),
    ("self_attn.v_proj", "attention.self.value"),
    ("self_attn.o_proj", "attention.output.dense"),
    ("post_attention_layernorm", "attention.output.LayerNorm"),
    ("post_mlp_layernorm", "output.LayerNorm"),
    ("mlp.fc1", "intermediate.dense"),
    ("mlp.fc2", "output.dense"),
];
const MPNET_NAMES: Names = &[
    ("relative_attention_bias", "encoder.relative_attention_bias"),
    ("layers.", "encoder.layer."),
    ("self_attn.q_proj", "attention.attn.q"),
    ("self_attn.k_proj", "attention.attn.k"),
    ("self_attn.v_proj", "attention.attn.v"),
    ("self_attn.o_proj", "attention.attn.o"),
    ("post_attention_layernorm", "attention.LayerNorm"),
    ("post_mlp_layernorm", "output.LayerNorm"),
    ("mlp.fc1", "intermediate.dense"),
    ("mlp.fc2", "output.dense"),
];
const DISTILBERT_NAMES: Names = &[
    ("layers.", "transformer.layer."),
    ("self_attn.q_proj", "attention.q_lin"),
    ("self_attn.k_proj", "attention.k_lin"),
    ("self_attn.v_proj", "attention.v_lin"),
    ("self_attn.o_proj", "attention.out_lin"),
    ("post_attention_layernorm", "sa_layer_norm"),
    ("post_mlp_layernorm", "output_layer_norm"),
    ("mlp.fc1", "ffn.lin1"),
    ("mlp.fc2", "ffn.lin2"),
];
/// `nomic-ai/nomic-bert-2048`.
const NOMIC_NAMES: Names = &[
    ("embeddings.LayerNorm", "emb_ln"),
    ("layers.", "encoder.layers."),
    ("self_attn.qkv_proj", "attn.Wqkv"),
    ("self_attn.o_proj", "attn.out_proj"),
    ("post_attention_layernorm", "norm1"),
    ("post_mlp_layernorm", "norm2"),
    ("mlp.up_proj", "mlp.fc11"),
    ("mlp.gate_proj", "mlp.fc12"),
    ("mlp.down_proj", "mlp.fc2"),
];
/// `Alibaba-NLP/new-impl`.
const GTE_NAMES: Names = &[
    ("layers.", "encoder.layer."),
    ("self_attn.", "attention."),
    ("post_attention_layernorm", "attn_ln"),
    ("post_mlp_layernorm", "mlp_ln"),
];
/// `jinaai/xlm-roberta-flash-implementation`.
const FLASH_NAMES: Names = &[
    ("embeddings.LayerNorm", "emb_ln"),
    ("layers.", "encoder.layers."),
    ("self_attn.qkv_proj", "mixer.Wqkv"),
    ("self_attn.o_proj", "mixer.out_proj"),
    ("post_attention_layernorm", "norm1"),
    ("post_mlp_layernorm", "norm2"),
];
/// Names of `transformers` that need no change.
const NATIVE: Names = &[];

/// Names under which a tensor is looked for: with each of the prefixes, in each of the layouts.
fn names(name: &str, prefixes: &[&str], layouts: &[Names]) -> Vec<String> {
    let mut found = Vec::new();
    for layout in layouts {
        let own =
            layout.iter().fold(name.to_owned(), |own, (ours, theirs)| own.replace(ours, theirs));
        for prefix in prefixes {
            found.push(format!("{prefix}{own}"));
            // BERT's first checkpoints, and those whose weights have adapters beside them.
            for (end, other) in [
                ("LayerNorm.weight", "LayerNorm.gamma"),
                ("LayerNorm.bias", "LayerNorm.beta"),
                (".weight", ".parametrizations.weight.original"),
            ] {
                if let Some(start) = own.strip_suffix(end) {
                    found.push(format!("{prefix}{start}{other}"));
                }
            }
        }
    }
    found
}

const BERT: Class = Class {
    family: "bert",
    starts: &["Bert"],
    positions: Positions::Table,
    head: Head::Pooler,
    padding: 0,
    eps: 1e-12,
    types: 2,
    relative: false,
    theta: 0.0,
    biased: true,
    activation: "gelu",
    centred: false,
    gated: None,
    names: |name| names(name, &["", "bert."], &[BERT_NAMES]),
};

const CLASSES: [Class; 7] = [
    BERT,
    Class {
        starts: &["Roberta", "XLMRoberta", "Camembert"],
        positions: Positions::BehindPadding,
        head: Head::Dense,
        padding: 1,
        eps: 1e-5,
        // That of Jina's first layout; other checkpoints do not say.
        theta: 10_000.0,
        names: |name| names(name, &["", "roberta."], &[BERT_NAMES, FLASH_NAMES]),
        ..BERT
    },
    Class {
        family: "mpnet",
        starts: &["MPNet"],
        positions: Positions::BehindPadding,
        head: Head::Dense,
        padding: 1,
        types: 0,
        relative: true,
        names: |name| names(name, &["", "mpnet."], &[MPNET_NAMES]),
        ..BERT
    },
    Class {
        starts: &["DistilBert"],
        head: Head::PreClassifier,
        types: 0,
        names: |name| names(name, &["", "distilbert."], &[DISTILBERT_NAMES]),
        ..BERT
    },
    Class {
        family: "nomic_bert",
        starts: &["NomicBert"],
        positions: Positions::Rotary,
        theta: 1000.0,
        biased: false,
        activation: "silu",
        centred: true,
        gated: Some(Gated { down_bias: false }),
        names: |name| names(name, &["", "bert.", "nomic_bert."], &[NOMIC_NAMES, NATIVE]),
        ..BERT
    },
    Class {
        family: "gte",
        starts: &["New", "Gte"],
        positions: Positions::Rotary,
        types: 1,
        theta: 160_000.0,
        gated: Some(Gated { down_bias: true }),
        names: |name| names(name, &["", "new.", "gte."], &[GTE_NAMES, NATIVE]),
        ..BERT
    },
    Class {
        family: "jina_embeddings_v3",
        starts: &["JinaEmbeddingsV3"],
        positions: Positions::Rotary,
        head: Head::Dense,
        eps: 1e-5,
        types: 1,
        theta: 20_000.0,
        names: |name| names(name, &["", "roberta."], &[FLASH_NAMES, NATIVE]),
        ..BERT
    },
];

/// The family of a model class; BERT's where it has no name.
pub(super) fn of(class: Option<&str>) -> &'static Class {
    let class = class.unwrap_or_default();
    let of = |family: &&Class| family.starts.iter().any(|start| class.starts_with(start));
    CLASSES.iter().find(of).unwrap_or(&CLASSES[0])
}
