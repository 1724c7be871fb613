package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"istio.io/istio/pilot/pkg/config/kube/crd"
	"istio.io/istio/pilot/pkg/features"
	"istio.io/istio/pilot/pkg/model"
	"istio.io/istio/pilot/test/xds"
	"istio.io/istio/pkg/config/mesh"
	"istio.io/istio/pkg/log"
	"istio.io/istio/pkg/test"
)

const (
	// namespace is the proxy's.
	namespace = "shop"
	domain    = "cluster.local"
	// address is the proxy's, which no object has.
	address = "10.9.0.99"
)

// versionsOf are the modules whose versions a result names.
var versionsOf = []string{"istio.io/istio", "istio.io/api", "github.com/envoyproxy/go-control-plane/envoy"}

// quieten keeps istiod's words out of the output.
func quieten() {
	for _, scope := range log.Scopes() {
		scope.SetOutputLevel(log.NoneLevel)
	}
}

// object is a JSON object of Envoy's configuration.
type object = map[string]any

// render returns the result as it is written.
func (c *renderCase) render() ([]byte, error) {
	features.FilterGatewayClusterConfig = true
	features.MetadataExchange = false
	features.ALPNFilter = false
	features.DisableMxALPN = true
	config := mesh.DefaultMeshConfig()
	config.DefaultProviders = nil
	config.AccessLogFile = ""
	config.EnableAutoMtls.Value = false
	made := &rendering{routes: object{}, assignments: object{}, changes: map[string]bool{}}
	configs, _, err := crd.ParseInputs(c.istio)
	if err != nil {
		return nil, err
	}
	for i := range configs {
		configs[i].Domain = domain // as istiod's client of the Kubernetes API does
	}
	err = test.Wrap(func(t test.Failer) {
		server := xds.NewFakeDiscoveryServer(t, xds.FakeOptions{
			KubernetesObjects: c.kubernetes, Configs: configs, MeshConfig: config,
		})
		made.read(server, c.setProxy(server))
	})
	if err == nil {
		err = made.failed
	}
	if err != nil {
		return nil, err
	}
	return made.result(c)
}

// setProxy returns the proxy that the result is for.
func (c *renderCase) setProxy(server *xds.FakeDiscoveryServer) *model.Proxy {
	proxy := &model.Proxy{
		ID: "proxy." + namespace, ConfigNamespace: namespace, IPAddresses: []string{address}, Type: model.SidecarProxy,
		Labels:   map[string]string{"app": "client"},
		Metadata: &model.NodeMetadata{Namespace: namespace, IstioVersion: "1.31.0", Labels: map[string]string{"app": "client"}},
	}
	if c.proxy == "gateway" {
		proxy.Type = model.Router
		proxy.Labels = map[string]string{"app": "istio-ingressgateway", "istio": "ingressgateway"}
		proxy.Metadata.Labels = proxy.Labels
	}
	return server.SetupProxy(proxy)
}

// rendering is what istiod made, and what of it Envoy runs.
type rendering struct {
	listeners, clusters []any
	routes, assignments object
	// changes are the changes that let Envoy run it without istiod.
	changes map[string]bool
	failed  error
}

// read takes the listeners, routes, clusters and endpoints that istiod makes for the proxy.
func (r *rendering) read(server *xds.FakeDiscoveryServer, proxy *model.Proxy) {
	listeners := server.Listeners(proxy)
	for _, listener := range listeners {
		if value := r.decode(listener); r.isServed(value, proxy) {
			r.listeners = append(r.listeners, value)
		}
	}
	for _, route := range server.RoutesFromListeners(proxy, listeners) {
		r.routes[route.Name] = r.decode(route)
	}
	for _, cluster := range server.Clusters(proxy) {
		r.clusters = append(r.clusters, r.decode(cluster))
	}
	for _, assignment := range server.Endpoints(proxy) {
		r.assignments[assignment.ClusterName] = r.decode(assignment)
	}
}

// decode returns a message as JSON.
func (r *rendering) decode(message proto.Message) object {
	value := object{}
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(message)
	if err == nil {
		decoder := json.NewDecoder(bytes.NewReader(text))
		decoder.UseNumber()
		err = decoder.Decode(&value)
	}
	if err != nil && r.failed == nil {
		r.failed = err
	}
	return value
}

// isServed returns whether the runner sends requests to the listener: all of a gateway, and those of
// a sidecar for HTTP to Services' ports.
func (r *rendering) isServed(listener object, proxy *model.Proxy) bool {
	if proxy.Type == model.Router {
		return true
	}
	name, _ := listener["name"].(string)
	if strings.HasPrefix(name, "0.0.0.0_") {
		// A sidecar's listeners get connections from the one that the kernel redirects to.
		listener["bind_to_port"] = true
		r.changes["listeners of Services' ports are bound, because nothing redirects to them"] = true
		return true
	}
	r.changes["listeners of a sidecar that are for no Service's HTTP port are left out"] = true
	return false
}

// result returns the file: what it was made from, and Envoy's bootstrap.
func (r *rendering) result(c *renderCase) ([]byte, error) {
	for _, listener := range r.listeners {
		if err := r.inline(listener); err != nil {
			return nil, err
		}
	}
	named := map[string]bool{}
	collectClusters(r.listeners, named)
	r.clusters = slices.DeleteFunc(r.clusters, func(cluster any) bool { return !named[nameOf(cluster)] })
	for _, cluster := range r.clusters {
		r.makeStatic(cluster.(object))
	}
	for _, list := range [][]any{r.listeners, r.clusters} {
		slices.SortFunc(list, func(a, b any) int { return cmp.Compare(nameOf(a), nameOf(b)) })
	}
	versions := object{}
	if build, ok := debug.ReadBuildInfo(); ok {
		for _, module := range build.Deps {
			if slices.Contains(versionsOf, module.Path) {
				versions[module.Path] = module.Version
				if module.Replace != nil {
					versions[module.Path] = module.Replace.Version
				}
			}
		}
	}
	changes := []any{}
	for _, change := range slices.Sorted(maps.Keys(r.changes)) {
		changes = append(changes, change)
	}
	return format(object{
		"made_by": object{
			"command": "canal-bench-istiod render", "versions": versions, "objects_sha256": c.digest, "proxy": c.proxy, "changes": changes,
		},
		"bootstrap": object{"static_resources": object{"listeners": orEmpty(r.listeners), "clusters": orEmpty(r.clusters)}},
	}), nil
}

func orEmpty(list []any) []any {
	if list == nil {
		return []any{}
	}
	return list
}

func nameOf(value any) string {
	name, _ := value.(object)["name"].(string)
	return name
}

// inline puts the route configurations into the listeners that fetch them, and takes out what only
// Istio's own Envoy has.
func (r *rendering) inline(value any) error {
	switch value := value.(type) {
	case object:
		if reference, ok := value["rds"].(object); ok {
			name, _ := reference["route_config_name"].(string)
			routes, exists := r.routes[name]
			if !exists {
				return fmt.Errorf("istiod made no route configuration %q", name)
			}
			delete(value, "rds")
			value["route_config"] = routes
			r.changes["route configurations are in the listeners that fetch them"] = true
		}
		if _, ok := value["tracing"].(object); ok {
			delete(value, "tracing")
			r.changes["settings of tracing are left out, because no provider is set"] = true
		}
		for key, inner := range value {
			if list, ok := inner.([]any); ok {
				value[key] = slices.DeleteFunc(list, r.isOfIstio)
			}
			if err := r.inline(value[key]); err != nil {
				return err
			}
		}
	case []any:
		for _, inner := range value {
			if err := r.inline(inner); err != nil {
				return err
			}
		}
	}
	return nil
}

// isOfIstio returns whether a filter is an extension that stock Envoy does not have.
func (r *rendering) isOfIstio(value any) bool {
	filter, isObject := value.(object)
	if !isObject {
		return false
	}
	name, _ := filter["name"].(string)
	if !strings.HasPrefix(name, "istio") {
		return false
	}
	r.changes["filter "+name+" is left out, because only Istio's Envoy has it"] = true
	return true
}

// makeStatic puts the endpoints into a cluster that fetches them.
func (r *rendering) makeStatic(cluster object) {
	if cluster["type"] != "EDS" {
		return
	}
	name := nameOf(cluster)
	if reference, ok := cluster["eds_cluster_config"].(object); ok && reference["service_name"] != nil {
		name, _ = reference["service_name"].(string)
	}
	delete(cluster, "eds_cluster_config")
	cluster["type"] = "STATIC"
	assignment, exists := r.assignments[name]
	if !exists {
		assignment = object{"cluster_name": name}
	}
	cluster["load_assignment"] = assignment
	r.changes["endpoints are in the clusters that fetch them"] = true
}

// collectClusters collects the names that routes and filters send requests to.
func collectClusters(value any, found map[string]bool) {
	switch value := value.(type) {
	case object:
		for key, inner := range value {
			if name, ok := inner.(string); ok && key == "cluster" {
				found[name] = true
			}
			if name, ok := inner.(string); ok && key == "name" {
				found[name] = true // a weighted cluster; other names are of no cluster
			}
			collectClusters(inner, found)
		}
	case []any:
		for _, inner := range value {
			collectClusters(inner, found)
		}
	}
}
