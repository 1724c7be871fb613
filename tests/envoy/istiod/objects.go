package main

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"
)

// created is the time of objects that state none, so that a result does not depend on the clock.
const created = "2026-01-01T00:00:00Z"

// renderCase is what istiod gets: the objects of a case with those that all cases share.
type renderCase struct {
	// proxy is `gateway` or `sidecar`.
	proxy string
	// kubernetes are the objects of Kubernetes' own groups, istio those of Istio's as YAML.
	kubernetes []runtime.Object
	istio      string
	// digest is the SHA-256 of all objects as they are written.
	digest string
}

// documents splits a file at its lines `---`, and leaves out documents of comments only.
func documents(text []byte) []string {
	var found []string
	for part := range strings.SplitSeq("\n"+string(text), "\n---\n") {
		object := map[string]any{}
		if err := yaml.Unmarshal([]byte(part), &object); err != nil || len(object) > 0 {
			found = append(found, strings.TrimSpace(part)+"\n")
		}
	}
	return found
}

// objectsDigest returns the digest by which a result names its objects. The program that compares
// Canal with Envoy computes it too.
func objectsDigest(base []byte, objects []string) string {
	sum := sha256.New()
	for _, document := range slices.Concat(documents(base), objects) {
		fmt.Fprintf(sum, "---\n%s", document)
	}
	return hex.EncodeToString(sum.Sum(nil))
}

func readCase(text, base []byte) (*renderCase, error) {
	own := documents(text)
	if len(own) == 0 {
		return nil, fmt.Errorf("the file is empty")
	}
	header := struct {
		Proxy string `json:"proxy"`
	}{Proxy: "gateway"}
	if err := yaml.Unmarshal([]byte(own[0]), &header); err != nil {
		return nil, fmt.Errorf("the case's description: %w", err)
	}
	if header.Proxy != "gateway" && header.Proxy != "sidecar" {
		return nil, fmt.Errorf("proxy: %q is neither gateway nor sidecar", header.Proxy)
	}
	one := &renderCase{proxy: header.Proxy, digest: objectsDigest(base, own[1:])}
	for _, document := range slices.Concat(documents(base), own[1:]) {
		if err := one.add(document); err != nil {
			return nil, fmt.Errorf("%w, in\n%s", err, document)
		}
	}
	one.kubernetes = append(one.kubernetes, one.endpoints()...)
	return one, nil
}

// add adds an object of which it knows the group.
func (c *renderCase) add(document string) error {
	object := metav1.PartialObjectMetadata{}
	if err := yaml.Unmarshal([]byte(document), &object); err != nil {
		return err
	}
	var typed runtime.Object
	switch {
	case strings.Contains(object.APIVersion, ".istio.io/"):
		whole := map[string]any{}
		if err := yaml.Unmarshal([]byte(document), &whole); err != nil {
			return err
		}
		if object.CreationTimestamp.IsZero() {
			whole["metadata"].(map[string]any)["creationTimestamp"] = created
		}
		text, err := yaml.Marshal(whole)
		c.istio += "---\n" + string(text)
		return err
	case object.Kind == "Service":
		typed = &corev1.Service{}
	case object.Kind == "Pod":
		typed = &corev1.Pod{}
	case object.Kind == "Namespace":
		typed = &corev1.Namespace{}
	default:
		return fmt.Errorf("%s %s is no object that is rendered", object.APIVersion, object.Kind)
	}
	if err := yaml.UnmarshalStrict([]byte(document), typed); err != nil {
		return err
	}
	c.kubernetes = append(c.kubernetes, typed)
	return nil
}

// endpoints returns an EndpointSlice for each Service with a selector, with the Pods that it selects.
func (c *renderCase) endpoints() []runtime.Object {
	var slicesMade []runtime.Object
	for _, object := range c.kubernetes {
		service, isService := object.(*corev1.Service)
		if !isService || len(service.Spec.Selector) == 0 {
			continue
		}
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name: service.Name, Namespace: service.Namespace, Labels: map[string]string{discoveryv1.LabelServiceName: service.Name},
			},
			AddressType: discoveryv1.AddressTypeIPv4,
		}
		for i := range service.Spec.Ports {
			port := &service.Spec.Ports[i]
			target := port.TargetPort
			if target == (intstr.IntOrString{}) {
				target = intstr.FromInt32(port.Port)
			}
			slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &port.Name, Port: &target.IntVal})
		}
		for _, other := range c.kubernetes {
			pod, isPod := other.(*corev1.Pod)
			if !isPod || pod.Namespace != service.Namespace || !labels.SelectorFromSet(service.Spec.Selector).Matches(labels.Set(pod.Labels)) {
				continue
			}
			ready := true
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
				Addresses:  []string{pod.Status.PodIP},
				Conditions: discoveryv1.EndpointConditions{Ready: &ready},
				TargetRef:  &corev1.ObjectReference{Kind: "Pod", Name: pod.Name, Namespace: pod.Namespace},
			})
		}
		slicesMade = append(slicesMade, slice)
	}
	return slicesMade
}
