//! Names of tensors: those of `VitsModel`, under which recipes ask, and those of the class that voices of Piper were
//! trained with (`SynthesizerTrn`).

/// Prefixes of both, the longer first.
const PARTS: [[&str; 2]; 7] = [
    ["text_encoder.embed_tokens.", "enc_p.emb."],
    ["text_encoder.project.", "enc_p.proj."],
    ["text_encoder.encoder.layers.", "enc_p.encoder."],
    ["duration_predictor.", "dp."],
    ["flow.flows.", "flow.flows."],
    ["decoder.", "dec."],
    ["embed_speaker.", "emb_g."],
];
/// Parts of an encoder's layer, whose number stands behind them in the other class.
const LAYER: [[&str; 2]; 4] = [
    ["attention.", "attn_layers"],
    ["layer_norm.", "norm_layers_1"],
    ["feed_forward.", "ffn_layers"],
    ["final_layer_norm.", "norm_layers_2"],
];
/// Other names within a layer of the encoder, and within the other parts.
const PROJECTIONS: [[&str; 2]; 4] = [
    ["q_proj.", "conv_q."],
    ["k_proj.", "conv_k."],
    ["v_proj.", "conv_v."],
    ["out_proj.", "conv_o."],
];
const WORDS: [[&str; 2]; 5] = [
    ["wavenet.", "enc."],
    ["conv_dds.convs_dilated.", "convs.convs_sep."],
    ["conv_dds.convs_pointwise.", "convs.convs_1x1."],
    ["conv_dds.", "convs."],
    ["upsampler.", "ups."],
];
/// The embedding of a voice with one speaker: the exporter gives it the name of the input that such a voice lacks.
const EMBEDDING: &str = "sid";
/// Scale of the affine flow where the exporter computed it, under the names that it gives that.
const SCALES: [&str; 2] = ["/dp/flows.0/Exp_output_0", "dp.flows.0.Mul"];
/// Its logarithm where it computed that.
const LOG_SCALES: [&str; 2] = ["/dp/flows.0/Neg_output_0", "dp.flows.0.Exp"];

/// Names under which a tensor is looked for.
pub(super) fn names(name: &str) -> Vec<String> {
    let mut names = vec![name.to_owned(), other(name)];
    match name {
        "text_encoder.embed_tokens.weight" => names.push(EMBEDDING.to_owned()),
        "duration_predictor.flows.0.scale" => names.extend(SCALES.map(str::to_owned)),
        "duration_predictor.flows.0.negative" => names.extend(LOG_SCALES.map(str::to_owned)),
        _ => {}
    }
    names
}

/// The name in the other class.
pub(super) fn other(name: &str) -> String {
    let Some(([own, part], rest)) =
        PARTS.iter().find_map(|pair| Some((pair, name.strip_prefix(pair[0])?)))
    else {
        return name.to_owned();
    };
    let mut rest = rest.to_owned();
    match *own {
        "text_encoder.encoder.layers." => {
            let split = rest.split_once('.').and_then(|(layer, rest)| {
                let (pair, rest) =
                    LAYER.iter().find_map(|pair| Some((pair, rest.strip_prefix(pair[0])?)))?;
                Some(format!("{}.{layer}.{rest}", pair[1]))
            });
            rest = split.unwrap_or(rest);
            if rest.starts_with("norm_layers") {
                rest = normed(&rest);
            }
        }
        // Every other flow turns the channels round there.
        "flow.flows." => rest = numbered(&rest, |flow| 2 * flow),
        "duration_predictor." => {
            if let Some(flow) = rest.strip_prefix("flows.") {
                rest = format!("flows.{}", numbered(flow, |flow| (2 * flow).saturating_sub(1)));
            }
            rest = rest.replace("translate", "m").replace("log_scale", "logs");
            if rest.contains("norm") {
                rest = normed(&rest);
            }
        }
        _ => {}
    }
    let words = if part.starts_with("enc_p.") { &PROJECTIONS[..] } else { &WORDS[..] };
    for [own, word] in words {
        rest = rest.replace(own, word);
    }
    if matches!(*own, "flow.flows." | "duration_predictor.") {
        for part in ["conv_pre.", "conv_post.", "conv_proj."] {
            rest = rest.replace(part, part.trim_start_matches("conv_"));
        }
    }
    format!("{part}{rest}")
}

/// Gain and shift of a LayerNorm.
fn normed(name: &str) -> String {
    name.replace(".weight", ".gamma").replace(".bias", ".beta")
}

fn numbered(rest: &str, number: impl Fn(usize) -> usize) -> String {
    match rest.split_once('.').map(|(flow, rest)| (flow.parse(), rest)) {
        Some((Ok(flow), rest)) => format!("{}.{rest}", number(flow)),
        _ => rest.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_found_under_both_names() {
        for (name, expected) in [
            (
                "text_encoder.encoder.layers.2.attention.q_proj.bias",
                "enc_p.encoder.attn_layers.2.conv_q.bias",
            ),
            (
                "text_encoder.encoder.layers.2.attention.emb_rel_k",
                "enc_p.encoder.attn_layers.2.emb_rel_k",
            ),
            (
                "text_encoder.encoder.layers.0.final_layer_norm.weight",
                "enc_p.encoder.norm_layers_2.0.gamma",
            ),
            (
                "text_encoder.encoder.layers.0.feed_forward.conv_1.weight",
                "enc_p.encoder.ffn_layers.0.conv_1.weight",
            ),
            ("text_encoder.project.weight", "enc_p.proj.weight"),
            ("flow.flows.3.wavenet.in_layers.1.bias", "flow.flows.6.enc.in_layers.1.bias"),
            ("flow.flows.1.conv_pre.weight", "flow.flows.2.pre.weight"),
            ("duration_predictor.flows.0.translate", "dp.flows.0.m"),
            (
                "duration_predictor.flows.2.conv_dds.norms_1.0.weight",
                "dp.flows.3.convs.norms_1.0.gamma",
            ),
            ("duration_predictor.conv_dds.convs_dilated.1.weight", "dp.convs.convs_sep.1.weight"),
            ("duration_predictor.conv_pre.bias", "dp.pre.bias"),
            ("duration_predictor.flows.2.conv_proj.weight", "dp.flows.3.proj.weight"),
            ("duration_predictor.conv_1.weight", "dp.conv_1.weight"),
            ("duration_predictor.norm_2.bias", "dp.norm_2.beta"),
            ("decoder.upsampler.0.weight", "dec.ups.0.weight"),
            ("decoder.conv_pre.weight", "dec.conv_pre.weight"),
            ("decoder.cond.weight", "dec.cond.weight"),
            ("embed_speaker.weight", "emb_g.weight"),
        ] {
            assert_eq!(other(name), expected);
        }
    }
}
