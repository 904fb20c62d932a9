//! The names that a recipe gives: each becomes a key of the manifest or a file of the bundle.

use std::collections::BTreeMap;

use qhx_base::{Error, ErrorKind, Result};
use qhx_types::DType;

use crate::recipe::{ContextPlan, Recipe};

/// Keys of the manifest's `artifacts` that no recipe gives.
const RESERVED: [&str; 5] = ["contexts", "embed", "files", "tokenizer", "tokenizer_config"];
/// Longest name of a graph, context or table.
const MAX_LEN: usize = 100;

/// The folder of ONNX reference graphs and their weights.
pub(crate) const ONNX: &str = "onnx";

/// The context binary of a context of the model `model`.
pub(crate) fn context_file(model: &str, context: &ContextPlan) -> String {
    format!("{model}_{}_{}.bin", context.key, context.precision.suffix())
}

/// The ONNX reference graph of a graph.
pub(crate) fn onnx_file(graph: &str) -> String {
    format!("{ONNX}/{graph}.onnx")
}

/// The golden steps of a model. In a folder: JSON files beside the manifest may be taken for manifests.
#[cfg(feature = "program")]
pub(crate) fn golden_file(model: &str) -> String {
    format!("golden/{model}.json")
}

/// The weights beside an ONNX file.
pub(crate) fn onnx_data_file(onnx: &str) -> String {
    format!("{onnx}_data")
}

/// The embedding table of the model `model`, as f16, as f32 or as i8.
pub(crate) fn embed_file(model: &str, dtype: DType) -> String {
    format!("{model}_embed_{dtype}.bin")
}

/// A further file of the model `model`.
pub(crate) fn table_file(model: &str, name: &str) -> String {
    format!("{model}_{name}")
}

/// Errors when a name of the recipe is not fit for a file, or when two things of it would be one key or one
/// file of the bundle. Names that differ in case only are one file on some file systems.
pub(crate) fn check(recipe: &Recipe) -> Result<()> {
    let mut keys = Owners::default();
    let mut files = Owners::default();
    for context in &recipe.contexts {
        let owner = format!("context {:?}", context.key);
        check_name(&owner, &context.key)?;
        keys.take(&format!("artifacts.contexts.{}", context.key), &owner)?;
        files.take(&context_file("<name>", context), &owner)?;
        for graph in &context.graphs {
            let owner = format!("graph {:?} of {owner}", graph.name());
            check_name(&owner, graph.name())?;
            files.take(&onnx_file(graph.name()), &owner)?;
        }
    }
    for dtype in [DType::F16, DType::F32, DType::I8] {
        files.take(&embed_file("<name>", dtype), "the embedding table")?;
    }
    for table in &recipe.tables {
        let owner = format!("tables {:?}", table.key);
        check_name(&owner, &table.key)?;
        if RESERVED.contains(&table.key.as_str()) {
            return Err(taken(&format!("artifacts.{}", table.key), &owner, "the forge"));
        }
        keys.take(&format!("artifacts.{}", table.key), &owner)?;
        for file in &table.files {
            let owner = format!("file {:?} of {owner}", file.name);
            check_name(&owner, &file.name)?;
            files.take(&table_file("<name>", &file.name), &owner)?;
        }
    }
    Ok(())
}

/// Errors unless the key of a context is fit for a file, and for a command line.
pub(crate) fn check_context(key: &str) -> Result<()> {
    let owner = format!("context {key:?}");
    if key.starts_with('-') {
        return Err(Error::new(ErrorKind::Manifest, format!("{owner}: a key begins with no '-'")));
    }
    check_name(&owner, key)
}

fn check_name(owner: &str, name: &str) -> Result<()> {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if (1..=MAX_LEN).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(legal) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Graph,
        format!(
            "{owner}: expected a name of up to {MAX_LEN} ASCII letters, digits, '.', '_' and '-' that does \
             not begin with '.'"
        ),
    ))
}

/// Owner of each key or file, by its name in lower case.
#[derive(Default)]
struct Owners(BTreeMap<String, String>);

impl Owners {
    fn take(&mut self, name: &str, owner: &str) -> Result<()> {
        match self.0.insert(name.to_ascii_lowercase(), owner.to_owned()) {
            None => Ok(()),
            Some(first) => Err(taken(name, owner, &first)),
        }
    }
}

fn taken(name: &str, owner: &str, first: &str) -> Error {
    Error::new(
        ErrorKind::Graph,
        format!("{name} of the bundle would be that of {first} and that of {owner}"),
    )
    .hint(
        "the recipe has to give each graph, context and table a name of its own; names that differ \
         only in upper and lower case are one file on some file systems",
    )
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;

    use serde_json::Map;

    use super::*;
    use crate::recipe::{Precision, TableFile, TableSource, Tables};
    use qhx_graph::builder::GraphBuilder;
    use qhx_graph::graph::{Elem, Graph, UnaryOp};
    use qhx_graph::progress::Progress;

    #[derive(Debug)]
    struct Nothing;

    impl TableSource for Nothing {
        fn bytes(&self) -> u64 {
            0
        }

        fn write(&self, _files: &mut [&mut dyn Write], _progress: &mut dyn Progress) -> Result<()> {
            Ok(())
        }
    }

    fn graph(name: &str) -> Graph {
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[1, 4]).unwrap();
        let y = b.unary(UnaryOp::Neg, x).unwrap();
        b.output("y", y).unwrap();
        b.finish().unwrap()
    }

    /// Contexts with the names of their graphs, and tables with the names of their files.
    fn recipe(contexts: &[(&str, &[&str])], tables: &[(&str, &[&str])]) -> Recipe {
        let contexts = contexts.iter().map(|(key, graphs)| {
            let graphs = graphs.iter().map(|name| graph(name)).collect();
            ContextPlan::new((*key).to_owned(), Precision::Fp16, graphs)
        });
        let file = |name: &&str| TableFile {
            field: "file".to_owned(),
            name: (*name).to_owned(),
            dtype: None,
            block: None,
        };
        let tables = tables.iter().map(|(key, files)| Tables {
            key: (*key).to_owned(),
            files: files.iter().map(file).collect(),
            source: Arc::new(Nothing),
        });
        Recipe::new("tiny", "tiny", contexts.collect(), Map::new()).tables(tables.collect())
    }

    #[test]
    fn colliding_names_are_refused_with_both_owners() {
        check(&recipe(&[("a", &["g", "h"]), ("b", &["i"])], &[("t", &["t.bin"])])).unwrap();
        for (recipe, words) in [
            (
                recipe(&[("a", &["g"]), ("b", &["h", "g"])], &[]),
                &["graph \"g\" of context \"a\"", "graph \"g\" of context \"b\""][..],
            ),
            (
                recipe(&[("a", &["Decode"]), ("b", &["decode"])], &[]),
                &["graph \"Decode\" of context \"a\"", "graph \"decode\" of context \"b\""],
            ),
            (recipe(&[("a", &["g"]), ("A", &["h"])], &[]), &["context \"a\"", "context \"A\""]),
            (
                recipe(&[("embed", &["g"])], &[]),
                &["<name>_embed_f16.bin", "context \"embed\"", "the embedding table"],
            ),
            (recipe(&[("a", &["g"])], &[("embed", &["t"])]), &["artifacts.embed", "tables"]),
            (recipe(&[("a", &["g"])], &[("t", &["x"]), ("u", &["X"])]), &["\"t\"", "\"u\""]),
            (recipe(&[("a", &["../g"])], &[]), &["graph \"../g\" of context \"a\"", "ASCII"]),
            (recipe(&[("", &["g"])], &[]), &["context \"\"", "ASCII"]),
        ] {
            let error = check(&recipe).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Graph, "{error}");
            for words in words {
                assert!(error.message().contains(words), "{error}\n  does not say {words:?}");
            }
        }
    }
}
