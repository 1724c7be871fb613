//! Edits of generated tenants: routes that appear, vanish, age, delegate, move to Gateways or refer to
//! other namespaces, and changes of everything around them. It compiles nothing. Start at
//! [`edited_tenants`].

use std::sync::{Arc, LazyLock};

use canal_compiler::resource_budget::CompiledSize;
use canal_generated_policies::routing::cases;
use canal_model::policy::gateway_api::ParentRef;
use canal_model::policy::istio::{Delegate, VirtualService};
use canal_model::policy::kubernetes::DIRECT_ANNOTATION;
use canal_model::policy::{Document, Object, Timestamp};
use proptest::prelude::*;
use proptest::sample::Index;

/// The objects of [`surroundings.yaml`](surroundings.yaml).
static SURROUNDINGS: LazyLock<Vec<Arc<Document>>> = LazyLock::new(|| {
    let parsed = canal_sources::parse("surroundings.yaml", include_str!("surroundings.yaml"));
    assert!(parsed.is_clean(), "{:?}", parsed.diagnostics);
    parsed.documents.into_iter().map(Arc::new).collect()
});

/// One edit of a tenant: what is done, and to which documents.
#[derive(Debug, Clone)]
pub(super) struct Edit {
    what: u8,
    at: Index,
    pub(super) other: Index,
}

/// A share that the tenant's first state nearly takes.
#[derive(Debug, Clone)]
pub(super) enum ScarceShare {
    Bytes(u64),
    Resources(u64),
    RouteTableBytes(u64),
}

impl ScarceShare {
    /// Returns the share of a tenant that uses so much.
    pub(super) fn beyond(&self, used: CompiledSize) -> CompiledSize {
        let mut max = CompiledSize::UNLIMITED;
        match self {
            Self::Bytes(left) => max.bytes = used.bytes + left,
            Self::Resources(left) => max.resources = used.resources + left,
            Self::RouteTableBytes(left) => max.route_table_bytes = used.route_table_bytes + left,
        }
        max
    }
}

/// A generated tenant with its surroundings, other versions of its objects, and edits of it.
#[derive(Debug, Clone)]
pub(super) struct GeneratedEdits {
    /// The objects of the tenant at first.
    pub(super) documents: Vec<Arc<Document>>,
    /// Versions of objects that edits put in.
    pub(super) pool: Vec<Arc<Document>>,
    pub(super) edits: Vec<Edit>,
    pub(super) scarce: Option<ScarceShare>,
}

pub(super) fn edited_tenants() -> impl Strategy<Value = GeneratedEdits> {
    let versions = prop::collection::vec(cases(), 4);
    // A rule takes at least 3,072 bytes of the route tables, and a small ring 11,264.
    let scarce = prop_oneof![
        (0..300u64).prop_map(ScarceShare::Bytes),
        (0..6u64).prop_map(ScarceShare::Resources),
        (0..60_000u64).prop_map(ScarceShare::RouteTableBytes),
    ];
    // Most tenants have only some of the objects around their routes: with all of them, few routes
    // are compiled without the whole tenant.
    let around = prop::collection::vec(any::<bool>(), SURROUNDINGS.len());
    let edits = prop::collection::vec(edit(), 1..16);
    (versions, around, edits, prop::option::weighted(0.4, scarce)).prop_map(
        |(versions, around, edits, scarce)| {
            let mut versions = versions.into_iter().map(|it| it.documents);
            let mut documents = versions.next().unwrap_or_default();
            documents.iter_mut().for_each(put_on_cloud_tier);
            let mut pool: Vec<_> = documents
                .iter()
                .cloned()
                .chain(versions.flatten())
                .collect();
            pool.retain(|it| !matches!(it.object, Object::Tenant(_)));
            pool.extend(SURROUNDINGS.iter().cloned());
            let present = SURROUNDINGS
                .iter()
                .zip(around)
                .filter(|(_, is_present)| *is_present);
            documents.extend(present.map(|(it, _)| it.clone()));
            GeneratedEdits {
                documents,
                pool,
                edits,
                scarce,
            }
        },
    )
}

fn edit() -> impl Strategy<Value = Edit> {
    let edit = (0..46u8, any::<Index>(), any::<Index>());
    edit.prop_map(|(what, at, other)| Edit { what, at, other })
}

/// Gateways have no addresses in a tenant that is not on the cloud tier.
fn put_on_cloud_tier(document: &mut Arc<Document>) {
    edit_object(document, |object| {
        if let Object::Tenant(tenant) = object {
            tenant.spec.gateway_cidrs = "10.250.0.0/20".parse().into_iter().collect();
        }
    });
}

fn is_route(document: &Document) -> bool {
    matches!(
        document.object,
        Object::HttpRoute(_) | Object::GrpcRoute(_) | Object::VirtualService(_)
    )
}

/// Makes an edit; `pool` has other versions of the objects. Most edits are of routes, in place:
/// after any other edit the compiler compiles the whole tenant, so that the comparison shows
/// nothing. Nobody measured the weights; `most_edits_of_routes_compile_only_routes` bounds them.
pub(super) fn apply(documents: &mut Vec<Arc<Document>>, pool: &[Arc<Document>], edit: &Edit) {
    let routes: Vec<usize> = (0..documents.len())
        .filter(|at| is_route(&documents[*at]))
        .collect();
    let route = (!routes.is_empty()).then(|| routes[edit.at.index(routes.len())]);
    let offered: Vec<&Arc<Document>> = pool.iter().filter(|it| is_route(it)).collect();
    match (edit.what, route) {
        (0..=14, _) if !offered.is_empty() => {
            put(documents, offered[edit.at.index(offered.len())], edit.other)
        }
        (15..=19, Some(at)) => drop(documents.remove(at)),
        // A file that is read again has new documents, also of what did not change.
        (20..=21, _) => {
            let first = edit.at.index(documents.len());
            for document in &mut documents[first..] {
                let mut moved = (**document).clone();
                moved.origin.line += u32::from(edit.what == 21);
                *document = Arc::new(moved);
            }
        }
        (22..=38, Some(at)) => edit_object(&mut documents[at], |object| {
            edit_route(object, edit.what, edit.other);
        }),
        (39, _) => {
            let middle = edit.at.index(documents.len());
            documents.rotate_left(middle);
        }
        (40, _) => {
            let copy = documents[edit.at.index(documents.len())].clone();
            documents.insert(edit.other.index(documents.len()), copy);
        }
        (41, _) => {
            for document in documents.iter_mut() {
                edit_object(document, |object| {
                    if let Object::Service(it) = object {
                        let wanted = (edit.at.index(2) == 0).to_string();
                        let annotations = &mut it.metadata.annotations;
                        annotations.insert(DIRECT_ANNOTATION.to_owned(), wanted);
                    }
                });
            }
        }
        (42, _) => drop(documents.remove(edit.at.index(documents.len()))),
        (43.., _) => put(documents, &pool[edit.at.index(pool.len())], edit.other),
        // Without a route there is none to edit, and the pool may offer none.
        _ => {}
    }
}

/// Replaces the object with the same key, or adds the document.
fn put(documents: &mut Vec<Arc<Document>>, document: &Arc<Document>, place: Index) {
    let key = document.object.key();
    match documents.iter().position(|it| it.object.key() == key) {
        Some(at) => documents[at] = document.clone(),
        None => documents.insert(place.index(documents.len() + 1), document.clone()),
    }
}

fn edit_object(document: &mut Arc<Document>, edit: impl FnOnce(&mut Object)) {
    let mut edited = (**document).clone();
    edit(&mut edited.object);
    *document = Arc::new(edited);
}

/// Edits a route in one way. `is_route` selects these three kinds only.
fn edit_route(route: &mut Object, what: u8, choice: Index) {
    match (what, route) {
        (22..=24, Object::HttpRoute(it)) => it.metadata.creation_timestamp = age(choice),
        (22..=24, Object::GrpcRoute(it)) => it.metadata.creation_timestamp = age(choice),
        (22..=24, Object::VirtualService(it)) => it.metadata.creation_timestamp = age(choice),
        (25..=26, Object::HttpRoute(it)) => move_to_gateway(&mut it.spec.parent_refs, choice),
        (25..=26, Object::GrpcRoute(it)) => move_to_gateway(&mut it.spec.parent_refs, choice),
        (25..=26, Object::VirtualService(it)) => {
            let gateways: &[&str] = match choice.index(4) {
                0 => &["ingress"],
                1 => &["mesh", "shop/ingress"],
                2 => &["mesh"],
                _ => &[],
            };
            it.spec.gateways = gateways.iter().map(|it| (*it).to_owned()).collect();
        }
        (27..=29, Object::HttpRoute(it)) => {
            let backends = it
                .spec
                .rules
                .iter_mut()
                .flat_map(|rule| &mut rule.backend_refs);
            for backend in backends.take(1 + choice.index(2)) {
                backend.namespace = "other".parse().ok();
                backend.name = "far".parse().expect("a name");
            }
        }
        (27..=28, Object::VirtualService(it)) => {
            let audience: &[&str] = match choice.index(4) {
                0 => &["."],
                1 => &["other"],
                2 => &["*"],
                _ => &[],
            };
            it.spec.export_to = audience.iter().map(|it| (*it).to_owned()).collect();
        }
        (29..=38, Object::VirtualService(it)) => delegate(it, choice.index(10)),
        _ => {}
    }
}

fn age(choice: Index) -> Option<Timestamp> {
    // Few times, so that routes often are of the same age.
    Some(Timestamp(choice.index(4) as u64))
}

/// Adds a Gateway to a route's parents, or removes all Gateways.
fn move_to_gateway(parents: &mut Vec<ParentRef>, choice: Index) {
    const GROUP: &str = "gateway.networking.k8s.io";
    if choice.index(2) == 0 {
        parents.retain(|parent| parent.group != GROUP);
        return;
    }
    parents.push(ParentRef {
        group: GROUP.to_owned(),
        kind: "Gateway".to_owned(),
        name: "edge".parse().expect("a name"),
        namespace: None,
        port: None,
        section_name: None,
    });
}

/// Makes a VirtualService a delegate, or one that delegates to another.
fn delegate(route: &mut VirtualService, choice: usize) {
    let spec = &mut route.spec;
    if choice < 4 {
        spec.hosts.clear();
        return;
    }
    // Some delegate to themselves, to one with hosts, or to one that does not exist.
    let (name, namespace) = match choice % 3 {
        0 => ("shared", "other".parse().ok()),
        1 => ("vs-0", None),
        _ => ("vs-1", None),
    };
    for rule in spec.http.iter_mut().take(choice - 3) {
        rule.delegate = Some(Delegate {
            name: name.parse().expect("a name"),
            namespace: namespace.clone(),
        });
        rule.route.clear();
        rule.redirect = None;
        rule.direct_response = None;
    }
}
