//! KittenTTS: the same network in other sizes, in an ONNX file that the package `kokoro` exported (`KModelForONNX`).
//!
//! Sizes are those of its tensors, and of its nodes where no tensor shows them. Texts are put as the package `kittentts`
//! 0.8.1 does (`onnx_model.py`): a voice's row is that of the length of the text, `…` stands behind the phonemes, and
//! the last samples are left out.

use std::collections::BTreeMap;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::{Checkpoint, is_plain};
use serde_json::{Map, Value, json};

use super::config::{Albert, Config, MAX_LAYERS};
use super::files::Voices;
use crate::kit::{Reader, object};

/// Symbols of `TextCleaner` in the order of their numbers. The last place counts of one that is there several times.
const SYMBOLS: [&str; 3] = [
    "$;:,.!?¡¿—…\"«»\"\" ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyzɑɐɒæɓʙβɔɕçɗɖðʤəɘɚɛɜɝɞɟʄɡɠɢʛɦɧħɥʜ",
    "ɨɪʝɭɬɫɮʟɱɯɰŋɳɲɴøɵɸθœɶʘɹɺɾɻʀʁɽʂʃʈʧʉʊʋⱱʌɣɤʍχʎʏʑʐʒʔʡʕʢǀǁǂǃˈˌːˑʼʴʰʱʲʷˠˤ˞↓↑→↗↘",
    "'\u{329}'ᵻ",
];
/// Symbol behind the phonemes.
const TAIL: &str = "…";
/// Samples at the end of each text that are not said.
const TRIM: usize = 5000;

/// The names of the module in the file: with the name of the whole, and of LSTMs, which are called by their nodes,
/// without the part that calls them.
pub(super) fn names(name: &str) -> Vec<String> {
    let called = name.strip_prefix("predictor.").map(str::to_owned);
    [Some(name.to_owned()), Some(format!("kmodel.{name}")), called].into_iter().flatten().collect()
}

/// Leaves out the Fourier transforms, and numbers that the exporter computed: they are of no module.
pub(super) fn leave_out(checkpoint: &Checkpoint) {
    checkpoint.leave_out("decoder.generator.stft");
    let computed =
        checkpoint.keys().filter(|key| !key.starts_with("kmodel.") && !key.contains("_l0"));
    computed.for_each(|key| checkpoint.leave_out(key));
}

/// Sizes by tensors and nodes.
pub(super) fn config(checkpoint: &Checkpoint) -> Result<Config> {
    let reader = Reader::whole(checkpoint);
    let fail = |what: String| {
        let hint = "the ONNX files of KittenTTS are read as they are published";
        reader.fault(what).hint(hint)
    };
    let stored = |name: &str| checkpoint.stored(name).map(|(_, shape)| shape);
    let size = |name: &str, at: usize| -> Result<usize> {
        let shape =
            stored(name).ok_or_else(|| fail(format!("the ONNX file has no tensor {name}")))?;
        shape.get(at).copied().filter(|n| (1..=1 << 16).contains(n)).ok_or_else(|| {
            fail(format!(
                "tensor {name} has the shape {shape:?}, expected a size as dimension {at}"
            ))
        })
    };
    let convolution = |at: &str, key: &str| {
        let of = |at: String| reader.get("convolutions")?.get(at)?.get(key)?.get(0)?.as_u64();
        let found = of(format!("kmodel.{at}")).or_else(|| of(at.to_owned()));
        let found = found.filter(|n| (1..=64).contains(n)).map(|n| n as usize);
        found.ok_or_else(|| {
            fail(format!("the ONNX file has no node of {at} with {key} from 1 to 64"))
        })
    };
    let query = "kmodel.bert.encoder.albert_layer_groups.0.albert_layers.0.attention.query";
    let width = size("bert.encoder.embedding_hidden_mapping_in.bias", 0)?;
    let used = reader.get("linears").and_then(|all| all.get(query));
    let uses = used.and_then(|one| one.get("uses")?.as_u64()).map(|n| n as usize);
    let layers = uses.filter(|n| (1..=MAX_LAYERS).contains(n));
    // The last size of a head, or both that make the width.
    let reshaped = used.and_then(|one| one.get("reshaped")?.as_array()?.last()?.as_u64());
    let dim = reshaped.and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
    let (Some(layers), Some(dim)) = (layers, dim.filter(|dim| width.is_multiple_of(*dim))) else {
        let used = used.unwrap_or(&Value::Null);
        let what = format!(
            "nodes of {query}: {used}, expected 1 to {MAX_LAYERS} uses, and heads that make {width} values"
        );
        return Err(fail(what));
    };
    let counted = |name: &dyn Fn(usize) -> String| {
        (0..MAX_LAYERS).take_while(|at| stored(&name(*at)).is_some()).count()
    };
    let block = |at: usize| format!("decoder.generator.resblocks.{at}.convs1");
    let mut blocks = Vec::new();
    for at in 0..counted(&|at| format!("{}.0.weight", block(at))) / 2 {
        let dilation = |index: usize| convolution(&format!("{}.{index}", block(at)), "dilations");
        let kernel = size(&format!("{}.0.weight", block(at)), 2)?;
        blocks.push((kernel, [dilation(0)?, dilation(1)?, dilation(2)?]));
    }
    let up = |at: usize| format!("decoder.generator.ups.{at}");
    let config = Config {
        hidden: size("bert_encoder.bias", 0)?,
        style: size("decoder.encode.norm1.fc.weight", 1)?,
        layers: counted(&|at| format!("text_encoder.cnn.{at}.0.weight")),
        tokens: size("text_encoder.embedding.weight", 0)?,
        durations: size("predictor.duration_proj.linear_layer.bias", 0)?,
        kernel: size("text_encoder.cnn.0.0.weight", 2)?,
        wide: size("decoder.encode.conv1.bias", 0)?,
        narrow: size("decoder.asr_res.0.bias", 0)?,
        initial: size(&format!("{}.weight", up(0)), 0)?,
        rates: [convolution(&up(0), "strides")?, convolution(&up(1), "strides")?],
        blocks,
        fft: size("decoder.generator.conv_post.bias", 0)?.saturating_sub(2),
        hop: convolution("decoder.generator.stft.weight_forward_real", "strides")?,
        convolved: true,
        albert: Albert {
            width,
            embedding: size("bert.embeddings.word_embeddings.weight", 1)?,
            heads: width / dim,
            inner: size("bert.encoder.albert_layer_groups.0.albert_layers.0.ffn.bias", 0)?,
            layers,
            positions: size("bert.embeddings.position_embeddings.weight", 0)?,
        },
        symbols: symbols(),
    };
    let kernels = [0, 1].map(|at| size(&format!("{}.weight", up(at)), 2));
    let [first, second] = kernels;
    if [first?, second?] != config.rates.map(|rate| 2 * rate)
        || config.symbols.values().any(|id| *id as usize >= config.tokens)
    {
        let what = format!(
            "rates {:?}, {} symbols: expected kernels of twice the rates, and a number for each of {}",
            config.rates,
            config.tokens,
            config.symbols.len()
        );
        return Err(fail(what));
    }
    config.fits().map_err(fail)?;
    Ok(config)
}

/// The numbers of symbols.
fn symbols() -> BTreeMap<String, u32> {
    let all = SYMBOLS.iter().flat_map(|part| part.chars());
    (0..).zip(all).map(|(id, symbol)| (symbol.to_string(), id)).collect()
}

/// Voices of the file that the configuration names, by the names that it gives them, and what speech by them needs.
pub(super) fn voices(
    checkpoint: &Checkpoint,
    config: &Config,
) -> Result<(Voices, Map<String, Value>)> {
    let reader = Reader::whole(checkpoint);
    let found = reader.get("voices").unwrap_or(&Value::Null);
    let Some(name) = found.as_str().filter(|name| is_plain(name)) else {
        return Err(reader.bad(
            "voices",
            found,
            "the name of a file beside it, such as voices.npz",
        ));
    };
    let path = checkpoint.dir().join(name);
    let file = Checkpoint::open_npz(&path)?;
    let aliases = reader.get("voice_aliases").and_then(Value::as_object);
    let called = |key: &str| {
        let named = aliases?.iter().find(|(_, of)| of.as_str() == Some(key));
        named.map(|(alias, _)| alias.clone())
    };
    let mut keys: Vec<String> = file.keys().map(str::to_owned).collect();
    keys.sort_by_key(|key| (called(key), key.clone()));
    let mut voices = Voices::default();
    let mut speeds = Vec::new();
    for key in keys {
        let shape = file.stored(&key).map(|(_, shape)| shape).unwrap_or_default();
        let name = called(&key).unwrap_or_else(|| key.clone());
        voices.add(&path, name, &shape, 2 * config.style, || file.values(&key, &shape))?;
        speeds.push(speed(&reader, &key)?);
    }
    if voices.names.is_empty() {
        let what = format!("{}: holds no voice, an array NAME.npy", path.display());
        return Err(Error::new(ErrorKind::Artifact, what));
    }
    let tail = config.symbols.get(TAIL).copied().unwrap_or_default();
    let own = object(json!({
        "counted": true,
        "tail": [tail],
        "trim": TRIM,
        "speeds": speeds,
        "script": {"by": "espeak", "voice": "en-us", "spaced": true},
    }));
    Ok((voices, own))
}

/// The usual speed of a voice.
fn speed(reader: &Reader<'_>, voice: &str) -> Result<f64> {
    let key = "speed_priors";
    match reader.get(key).and_then(|all| all.get(voice)) {
        None => Ok(1.0),
        Some(found) => found
            .as_f64()
            .filter(|n| (0.25..=4.0).contains(n))
            .ok_or_else(|| reader.bad(key, found, "numbers from 0.25 to 4")),
    }
}
