//! `model_config.yaml` of a recogniser as the `config.json` and `preprocessor_config.json` of `transformers`, and its
//! tensors under their names there. What would change the arithmetic and has no place there is refused.

use serde_json::{Value, json};

use super::Read;

/// The class of archives that is read.
const MULTI_TASK: &str = "EncDecMultiTaskModel";
/// The format of the prompt that the recipe has.
const PROMPT: &str = "canary2";
/// Vocabularies of special tokens and of each language.
pub(super) const SPECIAL: &str = "spl_tokens";
/// Largest size that a field may have.
const MAX_SIZE: u64 = 1 << 24;

/// A mapping of the configuration.
#[derive(Clone, Copy)]
struct Part<'a> {
    name: &'a str,
    value: &'a Value,
}

impl<'a> Part<'a> {
    fn of(config: &'a Value, name: &'a str) -> Read<Self> {
        let value = name.split('.').try_fold(config, |value, key| value.get(key));
        let value = value.filter(|value| value.is_object());
        value.map(|value| Self { name, value }).ok_or_else(|| format!("{name} is missing"))
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    fn bad(&self, key: &str, found: &Value, expected: &str) -> String {
        format!("{}.{key} is {found}, expected {expected}", self.name)
    }

    /// A field that has to be one of `allowed`; the first is what NeMo takes without it.
    fn only(&self, key: &str, allowed: &[Value]) -> Read<()> {
        let Some(default) = allowed.first() else { return Ok(()) };
        let found = self.value.get(key).unwrap_or(default);
        let number = |value: &Value| value.as_f64();
        let same = |allowed: &Value| {
            allowed == found || number(allowed).is_some() && number(allowed) == number(found)
        };
        if allowed.iter().any(same) {
            return Ok(());
        }
        let expected: Vec<_> = allowed.iter().map(Value::to_string).collect();
        Err(self.bad(key, found, &expected.join(" or ")))
    }

    fn size(&self, key: &str, default: Option<usize>) -> Read<usize> {
        let Some(found) = self.get(key) else {
            return default.ok_or_else(|| format!("{}.{key} is missing", self.name));
        };
        let size = found.as_u64().filter(|size| (1..=MAX_SIZE).contains(size));
        size.map(|size| size as usize).ok_or_else(|| self.bad(key, found, "a size"))
    }

    fn number(&self, key: &str, default: f64) -> Read<f64> {
        let Some(found) = self.get(key) else { return Ok(default) };
        let number = found.as_f64().filter(|number| (*number as f32).is_finite());
        number.ok_or_else(|| self.bad(key, found, "a number"))
    }

    fn flag(&self, key: &str, default: bool) -> Read<bool> {
        let Some(found) = self.get(key) else { return Ok(default) };
        found.as_bool().ok_or_else(|| self.bad(key, found, "true or false"))
    }

    /// The class that the part is of.
    fn class(&self, expected: &str) -> Read<()> {
        let found = self.get("_target_").and_then(Value::as_str).unwrap_or_default();
        if found.rsplit('.').next() == Some(expected) {
            return Ok(());
        }
        Err(format!("{}._target_ is {found:?}, expected {expected}", self.name))
    }
}

/// The configuration of the model; `pieces` are the tokens' texts, `languages` those of the vocabulary.
pub(super) fn of(config: &Value, pieces: &[&str], languages: &[String]) -> Read<Value> {
    let encoder = encoder(&Part::of(config, "encoder")?)?;
    check_target(config)?;
    if config.get("prompt_format").and_then(Value::as_str) != Some(PROMPT) {
        let found = config.get("prompt_format").unwrap_or(&Value::Null);
        return Err(format!("prompt_format is {found}, expected {PROMPT:?}"));
    }
    if let Some(between) = config.get("transf_encoder").filter(|value| value.is_object()) {
        Part { name: "transf_encoder", value: between }.only("num_layers", &[json!(0)])?;
    }
    let head = Part::of(config, "head")?;
    head.class("TokenClassifier")?;
    head.only("num_layers", &[json!(1)])?;
    let whole = Part::of(config, "transf_decoder")?;
    whole.class("get_nemo_transformer")?;
    whole.only("pre_ln_final_layer_norm", &[json!(true)])?;
    whole.only("encoder", &[Value::Null, json!(false)])?;
    whole.only("model_name", &[Value::Null])?;
    let decoder = Part::of(config, "transf_decoder.config_dict")?;
    decoder.only("hidden_act", &[json!("relu")])?;
    if !decoder.flag("pre_ln", false)? {
        return Err(decoder.bad("pre_ln", &json!(false), "true"));
    }
    decoder.only("learn_positional_encodings", &[json!(false)])?;
    let (hidden, heads) =
        (decoder.size("hidden_size", None)?, decoder.size("num_attention_heads", Some(1))?);
    if !hidden.is_multiple_of(heads) {
        return Err(format!(
            "transf_decoder.config_dict: a width of {hidden} and {heads} heads, expected heads that divide it"
        ));
    }
    // As the class rounds it.
    let vocab = pieces.len().next_multiple_of(8);
    let token = |text: &str| {
        let id = pieces.iter().position(|piece| *piece == text);
        id.ok_or_else(|| format!("its vocabulary has no {text}"))
    };
    let ids = json!({
        "decoder_start_token_id": token("<|startofcontext|>")?,
        "bos_token_id": token("<|startoftranscript|>")?,
        "eos_token_id": token("<|endoftext|>")?,
        "pad_token_id": token("<pad>")?,
    });
    let mut made = json!({
        "architectures": ["CanaryForConditionalGeneration"],
        "model_type": "canary",
        "encoder_config": encoder,
        "decoder_config": {
            "hidden_size": hidden,
            "intermediate_size": decoder.size("inner_size", None)?,
            "num_hidden_layers": decoder.size("num_layers", None)?,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": hidden / heads,
            "max_position_embeddings": decoder.size("max_sequence_length", Some(512))?,
            "hidden_act": "relu",
            "attention_bias": true,
            "vocab_size": vocab,
        },
        "encoder_projection": hidden != encoder["hidden_size"],
        "vocab_size": vocab,
        "tie_word_embeddings": true,
        "languages": languages,
    });
    if let (Some(made), Some(ids)) = (made.as_object_mut(), ids.as_object()) {
        made.extend(ids.clone());
    }
    Ok(made)
}

fn check_target(config: &Value) -> Read<()> {
    let target = config.get("target").and_then(Value::as_str).unwrap_or_default();
    if target.rsplit('.').next() == Some(MULTI_TASK) {
        return Ok(());
    }
    Err(format!("its class is {target:?}, expected {MULTI_TASK}"))
}

/// `ConformerEncoder` as `ParakeetEncoderConfig`.
fn encoder(part: &Part<'_>) -> Read<Value> {
    part.class("ConformerEncoder")?;
    for (key, only) in [
        ("self_attention_model", json!("rel_pos")),
        ("causal_downsampling", json!(false)),
        ("att_context_style", json!("regular")),
        ("untie_biases", json!(true)),
        ("conv_norm_type", json!("batch_norm")),
        ("conv_context_style", json!("regular")),
        ("global_tokens", json!(0)),
    ] {
        part.only(key, &[only])?;
    }
    let subsampling = part.get("subsampling").cloned().unwrap_or(json!("striding"));
    if subsampling != json!("dw_striding") {
        return Err(part.bad("subsampling", &subsampling, "\"dw_striding\""));
    }
    part.only("att_context_size", &[Value::Null, json!([-1, -1]), json!([[-1, -1]])])?;
    part.only("att_chunk_context_size", &[Value::Null])?;
    part.only("conv_context_size", &[Value::Null])?;
    part.only("reduction", &[Value::Null])?;
    part.only("feat_out", &[json!(-1), Value::Null])?;
    let hidden = part.size("d_model", None)?;
    let channels = match part.get("subsampling_conv_channels") {
        Some(found) if found.as_i64() == Some(-1) => hidden,
        _ => part.size("subsampling_conv_channels", Some(hidden))?,
    };
    let bias = part.flag("use_bias", true)?;
    Ok(json!({
        "hidden_size": hidden,
        "num_hidden_layers": part.size("n_layers", None)?,
        "num_attention_heads": part.size("n_heads", Some(4))?,
        "num_key_value_heads": part.size("n_heads", Some(4))?,
        "intermediate_size": hidden.saturating_mul(part.size("ff_expansion_factor", Some(4))?),
        "hidden_act": "silu",
        "attention_bias": bias,
        "convolution_bias": bias,
        "conv_kernel_size": part.size("conv_kernel_size", Some(31))?,
        "subsampling_factor": part.size("subsampling_factor", Some(4))?,
        "subsampling_conv_channels": channels,
        "num_mel_bins": part.size("feat_in", None)?,
        "scale_input": part.flag("xscaling", true)?,
    }))
}

/// `AudioToMelSpectrogramPreprocessor` as `ParakeetFeatureExtractor`.
pub(super) fn features(config: &Value) -> Read<Value> {
    features_of(&Part::of(config, "preprocessor")?)
}

fn features_of(part: &Part<'_>) -> Read<Value> {
    part.class("AudioToMelSpectrogramPreprocessor")?;
    for (key, allowed) in [
        ("normalize", json!("per_feature")),
        ("window", json!("hann")),
        ("log", json!(true)),
        ("log_zero_guard_type", json!("add")),
        ("log_zero_guard_value", json!(1.0 / f64::from(1u32 << 24))),
        ("frame_splicing", json!(1)),
        ("exact_pad", json!(false)),
        ("mag_power", json!(2.0)),
        ("lowfreq", json!(0)),
        ("mel_norm", json!("slaney")),
        ("pad_value", json!(0)),
    ] {
        part.only(key, &[allowed])?;
    }
    let rate = part.size("sample_rate", Some(16_000))?;
    if let Some(high) = part.get("highfreq")
        && ![Some(0.0), Some(rate as f64 / 2.0)].contains(&high.as_f64())
    {
        return Err(part.bad("highfreq", high, "half of sample_rate"));
    }
    let samples = |seconds: &str, number: &str, default: f64| match part.get(number) {
        Some(_) => part.size(number, None),
        None => {
            let count = part.number(seconds, default)? * rate as f64;
            let expected = "a time of one sample or more, and less than a second";
            match (1.0..rate as f64).contains(&count) {
                true => Ok(count as usize),
                false => Err(part.bad(seconds, &json!(count / rate as f64), expected)),
            }
        }
    };
    let window = samples("window_size", "n_window_size", 0.02)?;
    let emphasis = match part.value.get("preemph") {
        Some(Value::Null) => 0.0,
        _ => part.number("preemph", 0.97)?,
    };
    Ok(json!({
        "sampling_rate": rate,
        "feature_size": part.size("features", Some(64))?,
        "hop_length": samples("window_stride", "n_window_stride", 0.01)?,
        "n_fft": part.size("n_fft", Some(window.max(1).next_power_of_two()))?,
        "win_length": window,
        "preemphasis": emphasis,
        "padding_value": 0.0,
    }))
}

/// Configuration and `processor_config.json` of a model whose decoder takes an encoder's rows in its prompt (`SALM`).
/// `llm` is the decoder's configuration.
pub(super) fn speech_lm(config: &Value, llm: Value) -> Read<[Value; 2]> {
    let whole = Part { name: "config", value: config };
    whole.only("prompt_format", &[json!("qwen")])?;
    whole.only("encoder_chunk_size_seconds", &[Value::Null])?;
    whole.only("use_nemo_automodel", &[json!(false), Value::Null])?;
    let perception = Part::of(config, "perception")?;
    let adapter = Part::of(config, "perception.modality_adapter")?;
    adapter.class("IdentityConnector")?;
    // With it the class has no projection.
    adapter.only("output_dim", &[Value::Null])?;
    perception.only("output_dim", &[llm.get("hidden_size").cloned().unwrap_or_default()])?;
    let encoder =
        encoder(&Part { name: "perception.encoder", ..Part::of(config, "perception.encoder")? })?;
    adapter.only("d_model", &[encoder["hidden_size"].clone()])?;
    let scale = match config.get("lora").filter(|lora| lora.is_object()) {
        None => None,
        Some(value) => {
            let lora = Part { name: "lora", value };
            for (key, only) in [("use_dora", json!(false)), ("bias", json!("none"))] {
                lora.only(key, &[only])?;
            }
            for key in ["rank_pattern", "alpha_pattern"] {
                lora.only(key, &[Value::Null, json!({})])?;
            }
            let rank = lora.size("r", Some(8))? as f64;
            let rank = if lora.flag("use_rslora", false)? { rank.sqrt() } else { rank };
            Some(lora.number("lora_alpha", 8.0)? / rank)
        }
    };
    let made = json!({
        "architectures": [super::SPEECH_LM],
        "model_type": "nemo_speechlm",
        "encoder_config": encoder,
        "text_config": llm,
        "audio_locator_tag": config.get("audio_locator_tag"),
        (super::LORA_SCALE): scale,
    });
    let features = features_of(&Part::of(config, "perception.preprocessor")?)?;
    Ok([made, json!({"feature_extractor": features})])
}

/// Name in `transformers` of a tensor of such a model: of its encoder, or else of its decoder.
pub(super) fn name_of_speech_lm(name: &str) -> Option<String> {
    if let Some(rest) = name.strip_prefix("perception.encoder.") {
        return Some(format!("encoder.{}", replaced(rest, &ENCODER)));
    }
    if let Some(rest) = name.strip_prefix("perception.proj.") {
        return Some(format!("encoder.projection.{rest}"));
    }
    let decoder =
        ["llm.base_model.model.", "llm."].iter().find_map(|start| name.strip_prefix(start));
    match decoder {
        Some(rest) => Some(rest.replace(".base_layer.", ".")),
        None => (name == "embed_tokens.weight").then(|| format!("model.{name}")),
    }
}

/// Name in `transformers` of a tensor; none for one that is left out.
pub(super) fn name(name: &str) -> Option<String> {
    if let Some(rest) = name.strip_prefix("encoder_decoder_proj.") {
        return Some(format!("encoder.projection.{rest}"));
    }
    if let Some(rest) = name.strip_prefix("encoder.") {
        return Some(format!("encoder.{}", replaced(rest, &ENCODER)));
    }
    if let Some(rest) = name.strip_prefix("log_softmax.mlp.layer0.") {
        // The weight is that of the embedding.
        return (rest == "bias").then(|| "proj_out.bias".to_owned());
    }
    let rest = name.strip_prefix("transf_decoder.")?;
    let rest = match rest.strip_prefix("_embedding.") {
        Some("token_embedding.weight") => "embed_tokens.weight".to_owned(),
        Some("position_embedding.pos_enc") => "positions.weight".to_owned(),
        Some(rest) => format!("embedding_layernorm.{}", rest.strip_prefix("layer_norm.")?),
        None => {
            let rest = rest.strip_prefix("_decoder.")?;
            match rest.strip_prefix("final_layer_norm.") {
                Some(rest) => format!("norm.{rest}"),
                None => replaced(rest, &DECODER),
            }
        }
    };
    Some(format!("decoder.{rest}"))
}

/// Names of an encoder's tensors, theirs and ours.
const ENCODER: [(&str, &str); 10] = [
    ("pre_encode.conv.", "subsampling.layers."),
    ("pre_encode.out.", "subsampling.linear."),
    ("linear_q.", "q_proj."),
    ("linear_k.", "k_proj."),
    ("linear_v.", "v_proj."),
    ("linear_out.", "o_proj."),
    ("linear_pos.", "relative_k_proj."),
    ("pos_bias_u", "bias_u"),
    ("pos_bias_v", "bias_v"),
    ("batch_norm.", "norm."),
];
/// The same of a decoder's layers.
const DECODER: [(&str, &str); 12] = [
    ("layer_norm_1.", "input_layernorm."),
    ("layer_norm_2.", "post_attention_layernorm."),
    ("layer_norm_3.", "final_layernorm."),
    ("first_sub_layer.", "self_attn."),
    ("second_sub_layer.", "encoder_attn."),
    ("third_sub_layer.", "mlp."),
    ("query_net.", "q_proj."),
    ("key_net.", "k_proj."),
    ("value_net.", "v_proj."),
    ("out_projection.", "o_proj."),
    ("dense_in.", "fc1."),
    ("dense_out.", "fc2."),
];

fn replaced(name: &str, pairs: &[(&str, &str)]) -> String {
    pairs.iter().fold(name.to_owned(), |name, (theirs, ours)| name.replace(theirs, ours))
}
