//! The table of published checkpoints in `docs/checkpoints.md`: made again from the fields of their configurations.

use std::path::Path;

use qhx_forge::checkpoint::Checkpoint;
use qhx_forge::plan::plan;
use qhx_forge::recipe::Precision;
use qhx_forge::registry::recipe;
use qhx_forge::{AUTO_SHARDS, ForgeOptions};
use serde_json::{Value, json};

use super::read_json;

/// The table stands between these lines.
const MARKS: [&str; 2] = ["<!-- table of plans -->\n", "<!-- end of the table -->\n"];
const CONTEXT: usize = 4096;

/// Size of the bundle without reference graphs and the number of its contexts, or what is in the way.
fn planned(config: &Path, precision: Precision) -> Result<(String, usize), String> {
    let checkpoint = Checkpoint::synthetic(config, 1).map_err(|e| e.message().to_owned())?;
    let options = ForgeOptions {
        max_ctx: Some(CONTEXT),
        shards: AUTO_SHARDS,
        onnx: false,
        precision,
        ..ForgeOptions::new("out")
    };
    let (plan, _) =
        plan(&checkpoint, recipe, &options, true).map_err(|e| e.message().to_owned())?;
    Ok((format!("{:.1} GB", plan.bytes() as f64 / 1e9), plan.contexts.len()))
}

fn row(checkpoint: &Value, folder: &Path) -> String {
    let name = checkpoint["name"].as_str().unwrap();
    let mut config = match checkpoint["file"].as_str() {
        Some(file) => read_json(&qhx_paths::workspace().join("tests/configs").join(file)),
        None => checkpoint["config"].clone(),
    };
    for key in ["long_factor", "short_factor"] {
        if let Some(count) = config["rope_scaling"][key].as_u64() {
            config["rope_scaling"][key] = json!(vec![1.0; count as usize]);
        }
    }
    let class = config["architectures"][0].as_str().unwrap().to_owned();
    let path = folder.join("config.json");
    std::fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
    let all = [Precision::Fp16, Precision::W8A16, Precision::W4A16].map(|p| planned(&path, p));
    let cells = all.map(|found| match found {
        Ok((size, contexts)) => format!("{size}, {contexts}"),
        Err(what) if what.contains("no recipe") => "no recipe".to_owned(),
        Err(what) if what.contains("one process of the NPU") => "over 8 contexts".to_owned(),
        Err(what) => what.rsplit_once("config.json: ").map_or(what.clone(), |(_, w)| w.to_owned()),
    });
    format!("| {name} | `{class}` | {} |\n", cells.join(" | "))
}

#[test]
fn the_page_of_checkpoints_has_the_plans_of_the_forge() {
    let list = include_str!("published.json");
    let list: Vec<Value> = serde_json::from_str(list).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let rows: String = list.iter().map(|checkpoint| row(checkpoint, folder.path())).collect();
    let table =
        format!("| checkpoint | class | fp16 | w8a16 | w4a16 |\n|---|---|---|---|---|\n{rows}");
    let path = qhx_paths::workspace().join("docs/checkpoints.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(MARKS[0]).unwrap();
    let (found, after) = rest.split_once(MARKS[1]).unwrap();
    if std::env::var("INSTA_UPDATE").is_ok_and(|v| v == "always") {
        let [begin, end] = MARKS;
        std::fs::write(&path, format!("{before}{begin}{table}{end}{after}")).unwrap();
        return;
    }
    assert_eq!(found, table, "INSTA_UPDATE=always writes the table into {}", path.display());
}
