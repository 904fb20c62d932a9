//! Finds the document that is nearest to a query: `embed BUNDLE QUERY DOCUMENT…`.

use qhx::{Bundle, Role};

fn main() -> qhx::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [bundle, query, documents @ ..] = &arguments[..] else {
        eprintln!("expected a bundle, a query and documents");
        return Ok(());
    };
    let mut embedder = Bundle::open(bundle)?.embedder()?;
    // Prefixes of queries and of documents are the bundle's.
    let query = embedder.embed(query, Role::Query)?.to_vec();
    for (document, vector) in documents.iter().zip(embedder.embed_many(documents)?) {
        // Vectors are normalized: their dot product is the cosine.
        let cosine: f32 = query.iter().zip(&vector).map(|(a, b)| a * b).sum();
        println!("{cosine:.6} {document}");
    }
    Ok(())
}
