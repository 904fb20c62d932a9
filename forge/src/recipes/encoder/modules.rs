//! `modules.json` of `sentence-transformers`: how rows become a vector, and what that passes.

use std::path::Path;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::{Checkpoint, is_plain};
use qhx_graph::weight::{RowSource, held, scaled};
use serde_json::{Map, Value, json};

use super::{read, unsupported};
use crate::kit::MatrixFile;
use crate::recipe::RecipeOptions;
use crate::registry::RecipeOption;

/// The way to pool, in the place of what the checkpoint declares.
pub(in crate::recipes) const POOLING: RecipeOption = RecipeOption {
    name: "pooling",
    values: &[],
    help: "how a text's rows become a vector: mean, last, cls, max, mean_sqrt_len or weighted_mean [default: what the \
           checkpoint declares]",
};

/// The prefix of queries, in the place of what the checkpoint declares.
pub(in crate::recipes) const QUERY_PREFIX: RecipeOption = RecipeOption {
    name: "query-prefix",
    values: &[],
    help: "what is put before queries, such as \"search_query: \" [default: what the checkpoint declares]",
};
/// The same of documents.
pub(in crate::recipes) const DOCUMENT_PREFIX: RecipeOption = RecipeOption {
    name: "document-prefix",
    values: &[],
    help: "what is put before documents [default: what the checkpoint declares]",
};
/// Values of a vector, of models whose first values are a vector, too.
pub(in crate::recipes) const DIMENSIONS: RecipeOption = RecipeOption {
    name: "dimensions",
    values: &[],
    help: "the first values of a vector become the vector, divided by its norm, of models that were trained for it \
           (Matryoshka) [default: all of them]",
};
/// The options of an encoder.
pub(in crate::recipes) const OPTIONS: [RecipeOption; 4] =
    [POOLING, QUERY_PREFIX, DOCUMENT_PREFIX, DIMENSIONS];

/// Keys of the ways to pool in older files, and the op's names, in the order in which vectors are joined.
const FLAGS: [(&str, &str); 6] = [
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len"),
    ("pooling_mode_weightedmean_tokens", "weighted_mean"),
    ("pooling_mode_lasttoken", "last"),
];
/// The same of `pooling_mode`.
const NAMES: [(&str, &str); 6] = [
    ("cls", "cls"),
    ("max", "max"),
    ("mean", "mean"),
    ("mean_sqrt_len_tokens", "mean_sqrt_len"),
    ("weightedmean", "weighted_mean"),
    ("lasttoken", "last"),
];
/// The ends of torch's names of activations.
const ACTIVATIONS: [(&str, &str); 6] = [
    ("Identity", "identity"),
    ("Tanh", "tanh"),
    ("ReLU", "relu"),
    ("Sigmoid", "sigmoid"),
    ("SiLU", "silu"),
    ("GELU", "gelu"),
];
/// Epsilon of torch's `LayerNorm`, which the module does not change.
const EPS: f32 = 1e-5;
/// The tensors of a module, in the newer and in the older form.
const TENSORS: [&str; 2] = ["model.safetensors", "pytorch_model.bin"];
/// Folder of `Pooling` without a `modules.json`.
const POOLING_FOLDER: &str = "1_Pooling";

/// A dense layer of a head.
#[derive(Debug, Clone, Copy)]
pub(in crate::recipes) struct Dense<'a> {
    /// Its tensors, without `.weight` and `.bias`.
    pub name: &'a str,
    /// Outputs and inputs.
    pub shape: [usize; 2],
    pub bias: bool,
    /// The op's name.
    pub activation: &'a str,
    /// Divides what it gives, where it has no bias.
    pub temperature: f32,
    /// LayerNorm behind it.
    pub norm: Option<Norm<'a>>,
}

/// A LayerNorm of a head.
#[derive(Debug, Clone, Copy)]
pub(in crate::recipes) struct Norm<'a> {
    /// Its tensors, without `.weight` and `.bias`.
    pub name: &'a str,
    pub bias: bool,
    pub eps: f32,
}

/// Modules that a text's rows pass.
#[derive(Debug, Default)]
pub(in crate::recipes) struct Modules {
    /// The op's names.
    pub poolings: Vec<&'static str>,
    /// The pooled vector is divided by its norm, and nothing else is done with it.
    pub normalize: bool,
    /// Other steps that it passes, as the op reads them.
    pub steps: Vec<Value>,
    /// The weights.
    pub files: Vec<MatrixFile>,
    /// Heads for each token beside the text's vector, as the op reads them.
    pub of_tokens: Map<String, Value>,
    /// Tokens of prompts are not pooled.
    pub without_prompt: bool,
    /// Nothing declares a way to pool: it is that of most encoders.
    pub undeclared: bool,
}

impl Modules {
    /// Reads `modules.json` and the folders that it names; without it, `1_Pooling`, then what the configuration or a
    /// GGUF file declares. The option [`POOLING`] comes before all of them.
    ///
    /// All values of a `centred` vector are brought to a mean of 0 and a deviation of 1, where the first of them alone
    /// are taken ([`DIMENSIONS`]).
    pub fn read(
        checkpoint: &Checkpoint,
        options: &RecipeOptions,
        hidden: usize,
        causal: bool,
        centred: bool,
    ) -> Result<Self> {
        let (mut modules, width) = Self::declared(checkpoint, options, hidden, causal)?;
        modules.shorten(options, width, centred)?;
        Ok(modules)
    }

    /// Modules that the files declare, and the values of a vector.
    fn declared(
        checkpoint: &Checkpoint,
        options: &RecipeOptions,
        hidden: usize,
        causal: bool,
    ) -> Result<(Self, usize)> {
        let dir = checkpoint.dir();
        let path = dir.join("modules.json");
        let asked = asked(options)?;
        let Some(listed) = read(&path)? else {
            let mut modules = Self { normalize: true, ..Self::default() };
            if let Some(asked) = asked {
                modules.poolings = vec![asked];
                return Ok((modules, hidden));
            }
            let folder = dir.join(POOLING_FOLDER);
            modules.poolings = match read(&folder.join("config.json"))? {
                Some(config) => modules.pooling(&folder, &config)?,
                None => match own_pooling(checkpoint)? {
                    Some(pooling) => vec![pooling],
                    None if causal && checkpoint.seed().is_none() => {
                        return Err(no_pooling(checkpoint));
                    }
                    None => {
                        modules.undeclared = checkpoint.seed().is_none();
                        vec!["mean"]
                    }
                },
            };
            let width = hidden.saturating_mul(modules.poolings.len());
            return Ok((modules, width));
        };
        let mut modules = Self::default();
        let list = listed.as_array().map_or(&[][..], Vec::as_slice);
        let mut width = hidden;
        for module in list {
            let kind = module.get("type").and_then(Value::as_str).unwrap_or_default();
            let name = kind.rsplit('.').next().unwrap_or(kind);
            let folder = module.get("path").and_then(Value::as_str).unwrap_or_default();
            if !folder.is_empty() && !is_plain(folder) {
                let what = format!(
                    "a module's path is {folder:?}, expected the name of a folder beside it"
                );
                return Err(Error::new(ErrorKind::Artifact, format!("{}: {what}", path.display())));
            }
            let folder = dir.join(folder);
            let before = modules.poolings.is_empty();
            match name {
                "Transformer" if before => {}
                "Pooling" if before => {
                    let config = required(&folder)?;
                    let found = modules.pooling(&folder, &config)?;
                    modules.poolings = asked.map_or(found, |asked| vec![asked]);
                    width = hidden.saturating_mul(modules.poolings.len());
                }
                "Dense" if !before => width = modules.dense(&folder, width)?,
                "LayerNorm" if !before => modules.layer_norm(&folder, width)?,
                "Normalize" if !before => modules.steps.push(json!({"kind": "normalize"})),
                _ => {
                    let what = format!(
                        "the module {kind:?} is not applied here: expected Transformer, Pooling, and then Dense, \
                         LayerNorm and Normalize"
                    );
                    return Err(unsupported(&path, &what));
                }
            }
        }
        if modules.poolings.is_empty() {
            return Err(unsupported(
                &path,
                "no Pooling is among the modules: it gives no vector of a text",
            ));
        }
        if modules.files.is_empty() && modules.steps.len() <= 1 {
            modules.normalize = !modules.steps.is_empty();
            modules.steps.clear();
        }
        Ok((modules, width))
    }

    /// Gives each token what BGE-M3 has for it, by the files `sparse_linear.pt` and `colbert_linear.pt` where they are
    /// there: a weight, and a vector but for the first token.
    pub fn heads_of_tokens(&mut self, dir: &Path, width: usize) -> Result<()> {
        let beside = |name: &str| {
            let path = dir.join(name);
            path.is_file().then(|| Checkpoint::open_torch(&path)).transpose()
        };
        if let Some(tensors) = beside("sparse_linear.pt")? {
            self.weights_of_tokens(&tensors, "", width)?;
        }
        if let Some(tensors) = beside("colbert_linear.pt")? {
            let shape = tensors.stored("weight").map(|(_, shape)| shape).unwrap_or_default();
            let outputs = shape.first().copied().unwrap_or(width);
            let weight = self.file("tokens_weight", tensors.matrix("weight", [outputs, width])?);
            let bias = self.file("tokens_bias", tensors.vector("bias", outputs)?);
            let head = json!({"weight": weight, "bias": bias, "outputs": outputs, "skipped": 1});
            self.of_tokens.insert("vectors".to_owned(), head);
        }
        Ok(())
    }

    /// Gives each token a weight, by a head of one value whose tensors' names begin with `place`.
    pub fn weights_of_tokens(
        &mut self,
        tensors: &Checkpoint,
        place: &str,
        width: usize,
    ) -> Result<()> {
        let weight = tensors.matrix(&format!("{place}weight"), [1, width])?;
        let bias = tensors.vector(&format!("{place}bias"), 1)?;
        let (weight, bias) = (self.file("sparse_weight", weight), self.file("sparse_bias", bias));
        self.of_tokens.insert("weights".to_owned(), json!({"weight": weight, "bias": bias}));
        Ok(())
    }

    /// The layers of a head behind one way to pool.
    pub fn head(
        checkpoint: &Checkpoint,
        pooling: &'static str,
        layers: &[Dense<'_>],
    ) -> Result<Self> {
        let mut modules = Self { poolings: vec![pooling], ..Self::default() };
        layers.iter().try_for_each(|layer| modules.layer(checkpoint, layer))?;
        Ok(modules)
    }

    fn layer(&mut self, tensors: &Checkpoint, layer: &Dense<'_>) -> Result<()> {
        let Dense { name, shape: [outputs, inputs], bias, activation, temperature, norm } = *layer;
        let weight = tensors.matrix(&format!("{name}.weight"), [outputs, inputs])?;
        let weight = self.file("weight", scaled(weight, 1.0 / temperature));
        let bias = match bias {
            true => Some(self.file("bias", tensors.vector(&format!("{name}.bias"), outputs)?)),
            false => None,
        };
        self.steps.push(json!({
            "kind": "dense", "inputs": inputs, "outputs": outputs, "weight": weight, "bias": bias,
            "activation": activation
        }));
        let Some(Norm { name, bias, eps }) = norm else { return Ok(()) };
        let weight = tensors.vector(&format!("{name}.weight"), outputs)?;
        let bias = match bias {
            true => tensors.vector(&format!("{name}.bias"), outputs)?,
            false => held("bias", [1, outputs], vec![0.0; outputs]),
        };
        self.norm(weight, bias, eps);
        Ok(())
    }

    /// A LayerNorm with this weight and bias.
    fn norm(&mut self, weight: Arc<dyn RowSource>, bias: Arc<dyn RowSource>, eps: f32) {
        let (weight, bias) = (self.file("weight", weight), self.file("bias", bias));
        self.steps.push(json!({"kind": "layer_norm", "weight": weight, "bias": bias, "eps": eps}));
    }

    /// The first values of a vector of `width` in its place, where the option asks for that, divided by their norm;
    /// with `centred`, all values are brought to a mean of 0 and a deviation of 1 before.
    fn shorten(&mut self, options: &RecipeOptions, width: usize, centred: bool) -> Result<()> {
        let Some(text) = DIMENSIONS.choice(options) else { return Ok(()) };
        let Some(count) = text.parse().ok().filter(|count| (1..=width).contains(count)) else {
            let what = format!(
                "recipe option {}: {text:?}, expected a number from 1 to {width}, the values of a vector",
                DIMENSIONS.name
            );
            return Err(Error::new(ErrorKind::Usage, what));
        };
        self.normalize = false;
        self.steps.retain(|step| step["kind"] != "normalize");
        if centred {
            let [ones, zeros] =
                [1.0, 0.0].map(|value| held("centred", [1, width], vec![value; width]));
            self.norm(ones, zeros, EPS);
        }
        self.steps.push(json!({"kind": "truncate", "outputs": count}));
        self.steps.push(json!({"kind": "normalize"}));
        Ok(())
    }

    /// The ways to pool of a folder `1_Pooling`.
    fn pooling(&mut self, folder: &Path, config: &Value) -> Result<Vec<&'static str>> {
        self.without_prompt = config.get("include_prompt") == Some(&json!(false));
        let path = folder.join("config.json");
        let named = |value: &Value| {
            let found = NAMES.iter().find(|(name, _)| value.as_str() == Some(*name));
            found.map(|(_, own)| *own).ok_or_else(|| {
                let names = NAMES.map(|(name, _)| name).join(", ");
                unsupported(
                    &path,
                    &format!("pooling_mode is {value}, expected one or several of {names}"),
                )
            })
        };
        match config.get("pooling_mode") {
            None | Some(Value::Null) => {}
            Some(Value::Array(all)) if !all.is_empty() => return all.iter().map(named).collect(),
            Some(one) => return Ok(vec![named(one)?]),
        }
        let on = |key: &str| config.get(key) == Some(&Value::Bool(true));
        let unknown = config.as_object().into_iter().flatten().find(|(key, value)| {
            let known = FLAGS.iter().any(|(flag, _)| key == flag);
            key.starts_with("pooling_mode_") && !known && **value == Value::Bool(true)
        });
        if let Some((key, _)) = unknown {
            return Err(unsupported(
                &path,
                &format!("{key} is on, and is no way to pool that is known"),
            ));
        }
        let found: Vec<_> = FLAGS.iter().filter(|(key, _)| on(key)).map(|(_, own)| *own).collect();
        if found.is_empty() {
            let keys = FLAGS.map(|(key, _)| key).join(", ");
            return Err(unsupported(&path, &format!("none of pooling_mode, {keys} is on")));
        }
        Ok(found)
    }

    /// A dense layer of vectors of `width` values; gives the width behind it.
    fn dense(&mut self, folder: &Path, width: usize) -> Result<usize> {
        let config = required(folder)?;
        let path = folder.join("config.json");
        let get = |key: &str| config.get(key).unwrap_or(&Value::Null);
        let bad = |key: &str, expected: &str| {
            unsupported(&path, &format!("{key} is {}, expected {expected}", get(key)))
        };
        let size = |key: &str| get(key).as_u64().and_then(|n| usize::try_from(n).ok());
        let inputs = size("in_features").filter(|inputs| *inputs == width);
        let inputs =
            inputs.ok_or_else(|| bad("in_features", &format!("{width}, the width of a vector")))?;
        let outputs = size("out_features").filter(|n| *n > 0 && *n < 1 << 24);
        let outputs = outputs.ok_or_else(|| bad("out_features", "a width"))?;
        if get("use_residual") == &json!(true) {
            return Err(bad("use_residual", "false"));
        }
        for key in ["module_input_name", "module_output_name"] {
            if !matches!(get(key), Value::Null) && get(key) != "sentence_embedding" {
                return Err(bad(key, "\"sentence_embedding\""));
            }
        }
        let activation =
            get("activation_function").as_str().unwrap_or("torch.nn.modules.activation.Tanh");
        let name = activation.rsplit('.').next().unwrap_or(activation);
        let own = ACTIVATIONS
            .iter()
            .find(|(torch, _)| activation.starts_with("torch.nn.") && *torch == name);
        let (_, own) = own.ok_or_else(|| {
            bad("activation_function", "Identity, Tanh, ReLU, Sigmoid, SiLU or GELU of torch.nn")
        })?;
        let tensors = Checkpoint::open_beside(folder, "config.json", &TENSORS)?;
        self.layer(
            &tensors,
            &Dense {
                name: "linear",
                shape: [outputs, inputs],
                bias: get("bias") != &json!(false),
                activation: own,
                temperature: 1.0,
                norm: None,
            },
        )?;
        Ok(outputs)
    }

    fn layer_norm(&mut self, folder: &Path, width: usize) -> Result<()> {
        let config = required(folder)?;
        if config.get("dimension").and_then(Value::as_u64) != Some(width as u64) {
            let found = config.get("dimension").unwrap_or(&Value::Null);
            let what = format!("dimension is {found}, expected {width}, the width of a vector");
            return Err(unsupported(&folder.join("config.json"), &what));
        }
        let tensors = Checkpoint::open_beside(folder, "config.json", &TENSORS)?;
        let [weight, bias] = ["norm.weight", "norm.bias"].map(|name| tensors.vector(name, width));
        self.norm(weight?, bias?, EPS);
        Ok(())
    }

    /// Notes a file of weights for the host, and gives its field in the manifest.
    fn file(&mut self, part: &str, source: Arc<dyn RowSource>) -> String {
        let field = format!("{part}_{}", self.steps.len());
        self.files.push(MatrixFile::in_f32(&field, &format!("module_{field}"), source));
        field
    }
}

/// The `config.json` of a module.
fn required(folder: &Path) -> Result<Value> {
    let path = folder.join("config.json");
    read(&path)?.ok_or_else(|| {
        Error::new(ErrorKind::Artifact, format!("{}: missing", path.display()))
            .hint("modules.json lists it; complete the download")
    })
}

/// The way to pool that is asked for.
fn asked(options: &RecipeOptions) -> Result<Option<&'static str>> {
    let Some(text) = POOLING.choice(options) else { return Ok(None) };
    let found = NAMES.iter().find(|(_, own)| *own == text);
    found.map(|(_, own)| Some(*own)).ok_or_else(|| {
        let names = NAMES.map(|(_, own)| own).join(", ");
        let what = format!("recipe option {}: {text:?}, expected one of {names}", POOLING.name);
        Error::new(ErrorKind::Usage, what)
    })
}

/// The error of a causal model of which nothing says how it is pooled: the mean would look like vectors, and be others
/// than those it was trained for.
fn no_pooling(checkpoint: &Checkpoint) -> Error {
    let what = format!(
        "{}: nothing says how the rows of a text become a vector (modules.json, {POOLING_FOLDER}, pooling of config.json, \
         pooling_type of a GGUF file), and a causal model has no usual way",
        checkpoint.path().display()
    );
    Error::new(ErrorKind::Artifact, what).hint(
        "name it, most pool the last token: --recipe-option pooling=last; or complete the download with modules.json and \
         the folders that it names",
    )
}

/// The way to pool that the configuration of the model itself has, or the metadata of a GGUF file.
fn own_pooling(checkpoint: &Checkpoint) -> Result<Option<&'static str>> {
    match checkpoint.config().get("pooling") {
        None | Some(Value::Null) => match checkpoint.inside() {
            Some(inside) => inside.pooling(),
            None => Ok(None),
        },
        Some(value) => match value.as_str() {
            Some("avg" | "mean") => Ok(Some("mean")),
            Some("last") => Ok(Some("last")),
            Some("cls") => Ok(Some("cls")),
            _ => Err(Error::new(
                ErrorKind::Artifact,
                format!(
                    "{}: pooling is {value}, expected \"avg\", \"last\" or \"cls\"",
                    checkpoint.config_path().display()
                ),
            )),
        },
    }
}
