package conformance

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// controllerName is that of Canal's GatewayClasses.
	controllerName = "canal.mesh/gateway"
	// statusAge is how long an answer of Canal's about conditions is used. Addresses change without
	// a change of an object, so that it is short; the suite asks many times in a row.
	statusAge = 300 * time.Millisecond
)

// canalStatus is what `canal status --conditions` says of one object.
type canalStatus struct {
	Kind       string           `json:"kind"`
	Namespace  string           `json:"namespace"`
	Name       string           `json:"name"`
	Conditions []map[string]any `json:"conditions"`
	Addresses  []string         `json:"addresses"`
	// AttachedListenerSets is the number of ListenerSets of a Gateway.
	AttachedListenerSets int64 `json:"attachedListenerSets"`
	Listeners            []struct {
		Name           string           `json:"name"`
		AttachedRoutes int64            `json:"attachedRoutes"`
		SupportedKinds []string         `json:"supportedKinds"`
		Conditions     []map[string]any `json:"conditions"`
	} `json:"listeners"`
	Parents []struct {
		// Index is the parent's in spec.parentRefs.
		Index      int              `json:"index"`
		Conditions []map[string]any `json:"conditions"`
	} `json:"parents"`
}

// statusReader has Canal's newest answer about the conditions of the tenant's objects.
type statusReader struct {
	world *world
	mu    sync.Mutex
	read  time.Time
	byKey map[string]canalStatus
}

// forget makes the next question reach Canal.
func (r *statusReader) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.read = time.Time{}
}

// of returns what Canal says of an object; false if it says nothing.
func (r *statusReader) of(object client.Object, kind string) (canalStatus, bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.read) > statusAge {
		text, err := exec.Command(r.world.canal, "status", "--conditions", "--world", r.world.name,
			"--tenant", tenantName, "--output", "json").Output()
		if err != nil {
			words := ""
			if exit, ok := err.(*exec.ExitError); ok {
				words = strings.TrimSpace(string(exit.Stderr))
			}
			return canalStatus{}, false, fmt.Errorf("canal status --conditions: %w: %s", err, words)
		}
		var all []canalStatus
		if err := json.Unmarshal(text, &all); err != nil {
			return canalStatus{}, false, err
		}
		r.byKey = map[string]canalStatus{}
		for _, status := range all {
			r.byKey[strings.Join([]string{status.Kind, status.Namespace, status.Name}, "/")] = status
		}
		r.read = time.Now()
	}
	namespace := object.GetNamespace()
	if namespace == "" {
		namespace = "default" // Canal's, for kinds without a namespace
	}
	found, ok := r.byKey[strings.Join([]string{kind, namespace, object.GetName()}, "/")]
	return found, ok, nil
}

// fill writes the status that Canal computes into an object that the suite reads. What others wrote
// stays: conditions of other types, and parents of other controllers.
func (r *statusReader) fill(object client.Object, kind string) error {
	found, ok, err := r.of(object, kind)
	if err != nil || !ok {
		return err
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return err
	}
	status, _, _ := unstructured.NestedMap(content, "status")
	if status == nil {
		status = map[string]any{}
	}
	generation := object.GetGeneration()
	if len(found.Parents) > 0 || strings.HasSuffix(kind, "Route") {
		refs, _, _ := unstructured.NestedSlice(content, "spec", "parentRefs")
		status["parents"] = append(foreignParents(status), found.parents(refs, generation)...)
	} else {
		written, _ := status["conditions"].([]any)
		status["conditions"] = merge(written, stamped(found.Conditions, generation))
	}
	if kind == "Gateway" || kind == "ListenerSet" {
		written, _ := status["listeners"].([]any)
		status["listeners"] = found.listeners(written, generation)
	}
	if kind == "Gateway" {
		var addresses []any
		for _, address := range found.Addresses {
			addresses = append(addresses, map[string]any{"type": "IPAddress", "value": address})
		}
		status["addresses"] = addresses
		status["attachedListenerSets"] = found.AttachedListenerSets
	}
	content["status"] = status
	if object, ok := object.(*unstructured.Unstructured); ok {
		object.Object = content
		return nil
	}
	return runtime.DefaultUnstructuredConverter.FromUnstructured(content, object)
}

// stamped returns conditions as an object of this generation has them.
func stamped(conditions []map[string]any, generation int64) []any {
	var all []any
	for _, condition := range conditions {
		all = append(all, map[string]any{
			"type": condition["type"], "status": condition["status"], "reason": condition["reason"],
			"message": condition["message"], "observedGeneration": generation,
			"lastTransitionTime": time.Now().UTC().Format(time.RFC3339),
		})
	}
	return all
}

// merge returns the conditions that others wrote and Canal's, which replace those of the same type.
func merge(written, own []any) []any {
	types := map[any]bool{}
	for _, condition := range own {
		types[condition.(map[string]any)["type"]] = true
	}
	var all []any
	for _, condition := range written {
		if condition, ok := condition.(map[string]any); ok && !types[condition["type"]] {
			all = append(all, condition)
		}
	}
	return append(all, own...)
}

// foreignParents returns the status that other controllers wrote.
func foreignParents(status map[string]any) []any {
	parents, _ := status["parents"].([]any)
	all := []any{}
	for _, parent := range parents {
		if parent, ok := parent.(map[string]any); ok && parent["controllerName"] != controllerName {
			all = append(all, parent)
		}
	}
	return all
}

func (s canalStatus) parents(refs []any, generation int64) []any {
	var all []any
	for _, parent := range s.Parents {
		if parent.Index < len(refs) {
			all = append(all, map[string]any{
				"parentRef":      refs[parent.Index],
				"controllerName": controllerName,
				"conditions":     stamped(parent.Conditions, generation),
			})
		}
	}
	return all
}

func (s canalStatus) listeners(written []any, generation int64) []any {
	byName := map[any][]any{}
	for _, listener := range written {
		if listener, ok := listener.(map[string]any); ok {
			byName[listener["name"]], _ = listener["conditions"].([]any)
		}
	}
	var all []any
	for _, listener := range s.Listeners {
		kinds := []any{}
		for _, kind := range listener.SupportedKinds {
			kinds = append(kinds, map[string]any{"group": "gateway.networking.k8s.io", "kind": kind})
		}
		all = append(all, map[string]any{
			"name":           listener.Name,
			"attachedRoutes": listener.AttachedRoutes,
			"supportedKinds": kinds,
			"conditions":     merge(byName[listener.Name], stamped(listener.Conditions, generation)),
		})
	}
	return all
}
