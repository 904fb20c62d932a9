//! The drafting head: one layer of full attention that predicts the token after next (multi-token prediction).
//!
//! Its input is the sum of two projections, of the next token's embedding and of the decoder's hidden state after the
//! final norm, each normalised; its head is the decoder's (`MtpLayer` of `transformers`, with the embedding first).

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph};
use serde_json::Value;

use super::config::Config;
use super::layers::Model;
use crate::chain::DRAFT_HEAD;
use crate::kit::{Attend, AttendInputs, Decoder, one_or_many};
use crate::recipe::{ContextPlan, RecipeOptions};
use crate::registry::RecipeOption;

/// The context of its graphs.
const KEY: &str = "mtp";

/// Option that adds the drafting head to the bundle.
pub(super) const MTP: RecipeOption = RecipeOption {
    name: "mtp",
    values: &["auto", "on", "off"],
    help: "the drafting head for --speculate (mtp.*): where the checkpoint has one, or an error without; or left out",
};

/// Adds the graphs of the drafting head to those of a decoder with prefill graphs of `rows` tokens.
pub(super) fn add(
    decoder: &mut Decoder,
    model: &Model<'_>,
    options: &RecipeOptions,
    rows: &[usize],
) -> Result<()> {
    let checkpoint = model.layers.checkpoint;
    if !is_wanted(checkpoint, options)? {
        checkpoint.leave_out(KEY);
        return Ok(());
    }
    let rows = [1].into_iter().chain(rows.first().copied());
    let graphs = rows.map(|rows| graph(model, options.max_ctx, rows));
    let graphs = graphs.collect::<Result<Vec<_>>>()?;
    let names = graphs.iter().map(|graph| graph.name().to_owned()).collect();
    decoder.plan_params.insert(DRAFT_HEAD.to_owned(), one_or_many(names));
    // The head of the logits is last.
    let last = decoder.contexts.len().saturating_sub(1);
    let context = ContextPlan::new(KEY.to_owned(), options.precision, graphs).once();
    decoder.contexts.insert(last, context);
    Ok(())
}

/// True if the checkpoint has a head that this recipe knows, and the options want it.
fn is_wanted(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<bool> {
    let choice = MTP.choice(options);
    if choice == Some("off") {
        return Ok(false);
    }
    let text = checkpoint.text_config();
    let layers = ["mtp_num_hidden_layers", "num_mtp_layers"].iter().find_map(|key| text.get(key));
    let drawn = checkpoint.seed().is_some();
    let fault = if layers.is_some_and(|layers| layers.as_u64() != Some(1)) {
        let layers = layers.unwrap_or(&Value::Null);
        format!("it has {layers} layers (mtp_num_hidden_layers), expected 1")
    } else if text.get("mtp_use_dedicated_embeddings") == Some(&Value::Bool(true)) {
        "it has embeddings of its own (mtp_use_dedicated_embeddings), expected the decoder's"
            .to_owned()
    } else if !drawn && !checkpoint.has("mtp.fc.weight") {
        "the checkpoint has no tensor mtp.fc.weight, expected mtp.*; programs that save checkpoints leave them out"
            .to_owned()
    } else {
        return Ok(choice == Some("on") || !drawn);
    };
    if choice != Some("on") {
        return Ok(false);
    }
    let what = format!("recipe option mtp is on, but of the drafting head: {fault}");
    Err(Error::new(ErrorKind::Usage, what)
        .hint("leave the option out, or take the checkpoint as it was published"))
}

/// `rows` pairs of an embedding and a hidden state.
fn graph(model: &Model<'_>, max_ctx: usize, rows: usize) -> Result<Graph> {
    let (layers, Config { hidden, rotary_dim, .. }) = (&model.layers, model.config);
    let mut b = GraphBuilder::new(format!("{KEY}{rows}"));
    let x = b.input("x", Elem::Activation, &[rows, *hidden])?;
    let h = b.input("h", Elem::Activation, &[rows, *hidden])?;
    let attend = Attend::inputs(&mut b, &AttendInputs::new(*rotary_dim, rows, max_ctx))?;
    b.scope("pair");
    let x = layers.norm(&mut b, x, "mtp.pre_fc_norm_embedding")?;
    let h = layers.norm(&mut b, h, "mtp.pre_fc_norm_hidden")?;
    let pair = b.concat(&[x, h], 1)?;
    let h = layers.linear(&mut b, pair, "mtp.fc", *hidden, false)?;
    let place = "mtp.layers.0";
    b.scope("mtp_attn");
    let normed = layers.norm(&mut b, h, &format!("{place}.input_layernorm"))?;
    let mixed = model.attention(&mut b, normed, (place, model.config.layers.len()), &attend)?;
    let h = b.add(h, mixed)?;
    b.scope("mtp_mlp");
    let h = model.feed_forward(&mut b, h, place)?;
    b.scope("final");
    let y = layers.norm(&mut b, h, "mtp.norm")?;
    b.output("y", y)?;
    b.finish()
}
